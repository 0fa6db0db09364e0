"""Runs the mover of a rank's own pages in the rank's process, beside its steps."""

import asyncio
import logging
import os
import socket
import threading

import torch

from pdserve.base.ids import Peer
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.executor.memory import take_in_background
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.mover_process import serve
from pdserve.kvtransfer.region import Region
from pdserve.settings.config import WorkerConfig

logger = logging.getLogger(__name__)


def start_mover(config: WorkerConfig, region: Region, descriptor: int) -> None:
    """Let rank 0 drive a mover of these pages over a socket. Once nobody drives it, this process ends."""
    cores = os.sched_getaffinity(os.getppid())

    def new_mover(me: Peer, on_stopped: OnStopped) -> Mover:
        from pdserve.kvtransfer.backends.nixl import NixlBackend  # noqa: PLC0415 - may be missing where it is not used

        if region.gpu is None:
            take_in_background(torch.as_tensor(region.view))
        return Mover(NixlBackend(me, region, Network.of(config), config.test_fail_copies), on_stopped)

    def drive() -> None:
        os.sched_setaffinity(0, cores)  # the thread that computes is bound, and this one with it
        try:
            asyncio.run(serve(socket.socket(fileno=descriptor), new_mover, lambda: os._exit(0)))
        except Exception:
            logger.exception("the mover cannot be driven any more: this process ends")
            os._exit(DEVICE_EXIT_STATUS)

    threading.Thread(target=drive, name="mover-orders", daemon=True).start()
