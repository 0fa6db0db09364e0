"""A worker's mover: the engine's KV pages as a region, and the library that moves them."""

from importlib.util import find_spec

import torch
from torch import Tensor

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError, not_installed
from pdserve.ids import PageId
from pdserve.kvtransfer.backends.backend import Backend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Digests, Region, num_probe_rows
from pdserve.kvtransfer.session import Pages, Peer
from pdserve.worker.boot import KERNEL_DEVICES, Engine

LOOPBACK = "127.0.0.1"
_UNSIGNED = (1 << 64) - 1


def check_network(config: WorkerConfig) -> None:
    """Raise ConfigError where pages could not travel as configured."""
    if config.mover == "nixl":
        if find_spec("nixl_cu12") is None:
            raise not_installed("nixl_cu12")
        _network(config).settings()


def build_mover(
    config: WorkerConfig,
    me: Peer,
    region: Region,
    on_stopped: OnStopped,
    secret: bytes,
    listen: tuple[str, str] = (LOOPBACK, ""),
) -> Mover:
    """Start the configured mover. `listen`: the host on which it may listen, and the host that writers connect to."""
    if config.test_fail_copies and config.mover != "nixl":
        raise ConfigError(f"test_fail_copies: mover {config.mover} does not know how to fail on purpose")
    return Mover(_backend(config, me, region, secret, listen), on_stopped)


def kv_region(engine: Engine) -> Region:
    """Return an engine's pages: page i is row i of the view."""
    kv = engine.runner.kv
    view = kv.view(torch.uint8).view(len(kv), -1)
    return Region.of(view.numpy()) if view.device.type == "cpu" else device_region(view)


def device_region(view: Tensor) -> Region:
    """Return pages that the page-digest kernel can read. view: uint8 [num_pages, page_bytes], contiguous."""
    page_bytes = view.shape[1]
    probe = torch.zeros((num_probe_rows(page_bytes), page_bytes), dtype=torch.uint8, device=view.device)
    gpu = view.get_device() if view.device.type == "cuda" else None
    digests = _kernel_digests(view)
    digests((PageId(0),))  # compiled before anybody waits for it
    return Region(view, probe, view.data_ptr(), probe.data_ptr(), digests, gpu)


def _kernel_digests(view: Tensor) -> Digests:
    """Return what computes splitmix64 digests of pages where they lie. On a stream of its own: it waits for no step."""
    from pdserve.kernels.pageio import page_digests  # noqa: PLC0415 - a CPU worker has no need of Triton

    stream = torch.cuda.Stream(view.device) if view.device.type == "cuda" else None

    def digests(pages: Pages) -> tuple[int, ...]:
        with torch.cuda.stream(stream):
            ids = torch.tensor(pages, dtype=torch.int64, device=view.device)
            found = page_digests(view, ids).tolist()
        return tuple(digest & _UNSIGNED for digest in found)

    return digests


def _backend(config: WorkerConfig, me: Peer, region: Region, secret: bytes, listen: tuple[str, str]) -> Backend:
    # The library of the backend that is not configured may be missing.
    if config.mover == "nixl":
        from pdserve.kvtransfer.backends.nixl import NixlBackend  # noqa: PLC0415

        return NixlBackend(me, region, _network(config), config.test_fail_copies)
    from pdserve.kvtransfer.backends.collective import CollectiveBackend  # noqa: PLC0415
    from pdserve.kvtransfer.backends.pairing import Meeting  # noqa: PLC0415

    staged = config.device in KERNEL_DEVICES  # an engine in the interpreter does as one on a GPU
    return CollectiveBackend(me, region, Meeting(secret, *listen), staged=staged)


def _network(config: WorkerConfig) -> Network:
    return Network(config.handoff_host, config.handoff_rdma_devices, tcp_only=config.handoff_transport == "tcp")
