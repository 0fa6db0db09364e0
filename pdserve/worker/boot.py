"""Turns a worker's configuration into an engine and a mover.

Opens the checkpoint, has it loaded, schedules its pages, and starts the library that moves them.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pdserve.base.errors import ConfigError, not_installed
from pdserve.base.ids import Peer
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Scheduler
from pdserve.executor.executor import Executor
from pdserve.executor.form import KERNEL_DEVICES, Progress
from pdserve.executor.loading import load
from pdserve.executor.threads import Seat
from pdserve.kvtransfer.backends.backend import Backend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.ranked_mover import AnyMover, RankedMover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.remote_mover import RemoteMover
from pdserve.net.rpc import split_address
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.settings.config import WorkerConfig

if TYPE_CHECKING:
    from pdserve.executor.joining import Nodes


@dataclass(frozen=True, slots=True)
class Engine:
    executor: Executor
    scheduler: Scheduler
    layout: KvLayout
    vocab_size: int
    model_name: str


def open_model(config: WorkerConfig) -> Checkpoint:
    """Open the configured checkpoint; ConfigError names what is wrong with it."""
    return open_checkpoint(resolve_model(config.model))


def build_engine(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    secret: bytes,
    progress: Progress,
    seat: Seat | None = None,
    nodes: "Nodes | None" = None,
) -> Engine:
    """Load the model, and set up a scheduler for its pages. Takes seconds to minutes: not for an event loop."""
    with ExitStack() as failed:
        loaded = load(config, checkpoint, progress, seat, nodes)
        failed.callback(loaded.executor.close)
        model_name = config.served_model_name or checkpoint.name
        cache = KvCache(loaded.executor.region.num_pages, loaded.layout.paging, PrefixHasher(secret, model_name))
        scheduler = Scheduler(cache, loaded.limits)
        failed.pop_all()
    return Engine(loaded.executor, scheduler, loaded.layout, checkpoint.config.vocab_size, model_name)


def check_network(config: WorkerConfig) -> None:
    """Raise ConfigError where pages could not travel as configured."""
    if config.mover == "nixl":
        if not any(map(find_spec, ("nixl_cu13", "nixl_cu12"))):
            raise not_installed("nixl_cu12")
        Network.of(config).settings()


def build_mover(config: WorkerConfig, me: Peer, executor: Executor, on_stopped: OnStopped, secret: bytes) -> AnyMover:
    """Start the configured mover, where ranks have memory of their own in each rank's process."""
    if config.test_fail_copies and config.mover != "nixl":
        raise ConfigError(f"test_fail_copies: mover {config.mover} does not know how to fail on purpose")
    others = [RemoteMover(each, me, part, on_stopped) for part, each in enumerate(executor.mover_sockets, start=1)]
    own = Mover(_backend(config, me, executor.region, secret), on_stopped)
    return own if executor.region.share is None else RankedMover(own, others)


def _backend(config: WorkerConfig, me: Peer, region: Region, secret: bytes) -> Backend:
    # The library of the backend that is not configured may be missing.
    if config.mover == "nixl":
        from pdserve.kvtransfer.backends.nixl import NixlBackend  # noqa: PLC0415

        return NixlBackend(me, region, Network.of(config), config.test_fail_copies)
    from pdserve.kvtransfer.backends.collective import CollectiveBackend  # noqa: PLC0415
    from pdserve.kvtransfer.backends.pairing import Meeting  # noqa: PLC0415

    meeting = Meeting(secret, config.handoff_host, split_address(config.handoff_advertise or "")[0])
    staged = config.device in KERNEL_DEVICES  # an engine in the interpreter does as one on a GPU
    return CollectiveBackend(me, region, meeting, staged=staged)
