"""A frontend as a process of its own.

Arguments: the descriptor of its channel, its number, the router's process, and the router's configuration as JSON.

The router decides when it ends; with the router it ends at once.
"""

import gc
import os
import signal
import socket
import sys

import uvloop

from pdserve.router.config import YOUNG_OBJECTS, RouterConfig
from pdserve.router.frontend.channel import Ready
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.doors import open_doors
from pdserve.router.frontend.prompts import ServedModel
from pdserve.router.frontend.remote import Remote
from pdserve.router.frontend.served import load_model
from pdserve.signals import STOP_SIGNALS, die_with_parent, end_served
from pdserve.telemetry import configure_logging

ABANDONED_STATUS = 1


def main() -> None:
    descriptor, number, router = map(int, sys.argv[1:4])
    os.set_inheritable(descriptor, False)  # children that held it would keep the channel open after this process's end
    for stop in STOP_SIGNALS:  # a terminal and systemd send them to all processes of a router
        signal.signal(stop, signal.SIG_IGN)
    die_with_parent(router)
    config = RouterConfig.model_validate_json(sys.argv[4])
    gc.set_threshold(YOUNG_OBJECTS)
    configure_logging(f"frontend-{number}", config.log_level, config.log_format)
    with socket.socket(fileno=descriptor) as ours:
        uvloop.run(serve(config, load_model(config), ours))
    end_served(0)


async def serve(config: RouterConfig, model: ServedModel, ours: socket.socket) -> None:
    """Serve a model's clients until the router wants an end."""
    remote = Remote()
    await remote.connect(ours)
    async with open_doors(config, model, remote, Clients(config.api_keys_file, remote.tenants)) as doors:
        remote.changed = doors.changed
        remote.channel.post(Ready())
        why = await remote.stopped
        if why:
            os._exit(ABANDONED_STATUS)  # nobody decides any more


if __name__ == "__main__":
    main()
