"""The process of a rank that is not the first: it computes its part of each step that rank 0 tells it.

It ends when rank 0 does, or closes the socket; and at once when its own part fails, so that no rank waits for it. Where
its pages are its own, it also runs their mover, as rank 0 orders on another socket: nobody else can reach them.
"""

import logging
import os
import signal
import socket
import sys
from contextlib import suppress

from pdserve.base.collector import collect_rarely
from pdserve.base.errors import ConfigError
from pdserve.base.processes import STOP_SIGNALS
from pdserve.base.signals import die_with_parent, end_served
from pdserve.executor.threads import thread_defaults
from pdserve.net.frames import Channel
from pdserve.observe.logs import configure_logging
from pdserve.settings.config import WorkerConfig

logger = logging.getLogger(__name__)


def main(descriptor: int, parent: int) -> None:
    """Serve rank 0, whose process is `parent`, over a connected socket."""
    die_with_parent(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a terminal's go to all: rank 0 drains, and then closes the socket
    os.sched_setaffinity(0, os.sched_getaffinity(parent))  # the thread that has started this process may be bound
    collect_rarely()
    with socket.socket(fileno=descriptor) as connected:
        _serve(connected)
    end_served(0)


def _serve(connected: socket.socket) -> None:
    from pdserve.executor.rank_frames import Ended, Setup, Step  # noqa: PLC0415 - it knows of the engine

    channel = Channel(connected)
    with suppress(EOFError, OSError):
        setup = channel.receive(Setup)
        config = WorkerConfig.model_validate_json(setup.settings)
        configure_logging(f"{config.worker_id}/rank-{setup.index}", config.log_level, config.log_format)
        here = config.degrees.ranks_per_node
        with thread_defaults(os.environ, config.num_threads, rank=setup.index % here, num_ranks=here):
            # Torch reads the environment.
            from pdserve.executor.rank_loading import load_follower  # noqa: PLC0415
            from pdserve.executor.rank_mover import start_mover  # noqa: PLC0415
        try:
            follow, region = load_follower(config, setup, channel)
            if region is not None and setup.mover is not None:
                start_mover(config, region, setup.mover)
        except EOFError:  # rank 0 has refused what it has loaded itself
            return
        except ConfigError as error:
            channel.send(Ended(str(error), is_refusal=True))
            return
        except Exception as error:
            logger.exception("the model is not loaded")
            channel.send(Ended(f"rank {setup.index}: {type(error).__name__}: {error}"))
            return
        channel.send(Ended())
        while True:
            step = channel.receive(Step)
            try:
                follow(step)
            except Exception as error:
                logger.exception("a step failed")
                channel.send(Ended(f"rank {setup.index}: {type(error).__name__}: {error}"))
                return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
