"""Which library moves a worker's pages."""

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.mover import Mover, OnStopped, Region
from pdserve.kvtransfer.session import Peer
from pdserve.worker.boot import KERNEL_DEVICES

LOOPBACK = "127.0.0.1"


def check_network(config: WorkerConfig) -> None:
    """Raise ConfigError where pages could not travel as configured."""
    if config.mover == "nixl":
        _network(config).settings()


def build_mover(
    config: WorkerConfig,
    me: Peer,
    region: Region,
    on_stopped: OnStopped,
    secret: bytes,
    listen: tuple[str, str] = (LOOPBACK, ""),
) -> Mover:
    """Start the configured mover. `listen`: host where it may await others, and the one that they are told."""
    if config.test_fail_copies and config.mover != "nixl":
        raise ConfigError(f"test_fail_copies: mover {config.mover} does not know how to fail on purpose")
    if config.mover == "nixl":
        from pdserve.kvtransfer.backends.nixl import NixlMover  # noqa: PLC0415 - the library of the other one may be missing

        return NixlMover(me, region, on_stopped, _network(config), config.test_fail_copies)
    from pdserve.kvtransfer.backends.collective import CollectiveMover  # noqa: PLC0415
    from pdserve.kvtransfer.backends.pairing import Meeting  # noqa: PLC0415

    staged = config.device in KERNEL_DEVICES  # an engine in the interpreter does as one on a GPU
    return CollectiveMover(me, region, on_stopped, Meeting(secret, *listen), staged)


def _network(config: WorkerConfig) -> Network:
    return Network(config.handoff_host, config.handoff_rdma_devices, tcp_only=config.handoff_transport == "tcp")
