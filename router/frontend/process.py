"""A frontend as a process of its own. Arguments: the descriptor of its channel, its number, the router's process.

The router decides when it ends; with the router it ends at once.
"""

import gc
import os
import signal
import socket
import sys

import uvloop

from pdserve.router.config import YOUNG_OBJECTS, RouterConfig
from pdserve.router.frontend.channel import FromCore, Hello, Ready, core_decoder, read_frame
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.doors import open_doors
from pdserve.router.frontend.prompts import ServedModel
from pdserve.router.frontend.remote import Remote
from pdserve.router.frontend.served import load_model
from pdserve.signals import STOP_SIGNALS, die_with_parent
from pdserve.telemetry import configure_logging

ABANDONED_STATUS = 1


def main() -> None:
    descriptor, number, router = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)  # children that held it would keep the channel open after this process's end
    for stop in STOP_SIGNALS:  # a terminal and systemd send them to all processes of a router
        signal.signal(stop, signal.SIG_IGN)
    die_with_parent(router)
    with socket.socket(fileno=descriptor) as ours:
        hello, *rest = core_decoder.decode(read_frame(ours))
        assert isinstance(hello, Hello)
        config = RouterConfig.model_validate_json(hello.config)
        gc.set_threshold(YOUNG_OBJECTS)
        configure_logging(f"frontend-{number}", config.log_level, config.log_format)
        uvloop.run(serve(config, load_model(config), ours, rest))


async def serve(config: RouterConfig, model: ServedModel, ours: socket.socket, first: list[FromCore]) -> None:
    """Serve a model's clients until the router wants an end. `first`: messages that have come with the hello."""
    remote = Remote(shows_metrics=config.metrics)
    await remote.connect(ours)
    for message in first:
        remote.take(message)
    async with open_doors(config, model, remote, Clients(config.api_keys_file, remote.tenants)) as doors:
        remote.changed = doors.changed
        remote.channel.post(Ready())
        why = await remote.stopped
        if why:
            os._exit(ABANDONED_STATUS)  # nobody decides any more


if __name__ == "__main__":
    main()
