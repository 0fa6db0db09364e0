"""Ranks that each have a device of their own: a group of torch.distributed, over NCCL between GPUs.

Where Triton interprets, devices are this machine's CPUs, and the group is gloo's, over loopback. What NCCL alone needs
is in this module.

Invariant: all ranks launch the same operations in the same order, on the stream that computes; so graphs capture them.
Nothing here waits for a GPU.

Ranks find each other in memory that all of them inherit, which is a file to torch: none of torch's stores listens.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.nn import functional

from pdserve.base.errors import ConfigError
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.kernels.cpu.calls import Calls
from pdserve.model.elementwise import times
from pdserve.model.weights import Rank

if TYPE_CHECKING:
    from pdserve.settings.config import Device

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=365)
LOOPBACK = "127.0.0.1"
# torch's own threads would abort a process with another status than ours, or while a rank is only frozen. Whoever waits
# for a step ends the worker. Images for training set some of these otherwise: ours count.
TORCH_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


class GroupRanks:
    """One rank; see `pdserve.model.parallel.Collective`.

    On CPUs RuntimeError where another rank has ended, or takes longer than a limit. On GPUs a step waits for ever then.
    """

    def __init__(self, rank: Rank, device: torch.device, host: str = LOOPBACK) -> None:
        """Compute on a device. `join` or `meet` comes before the first operation. host: where the group listens."""
        self.rank, self.device, self._host = rank, device, host
        self._group: Any = None  # torch's stubs lack what it can do

    def join(self, descriptor: int, limit_s: float) -> None:
        """Meet the others. descriptor: of empty memory that all have inherited, which stays open."""
        self.meet(c10d.FileStore(f"/proc/self/fd/{descriptor}", self.rank.size), limit_s)

    def meet(self, store: c10d.Store, limit_s: float) -> None:
        """Meet the others, in a store that all of them have."""
        limit = timedelta(seconds=limit_s)
        make = _nccl if self.device.type == "cuda" else _gloo
        self._group = make(store, self.rank, limit, self._host)
        self.all_reduce(torch.zeros(1, device=self.device))  # nothing is captured before all have met
        self.spread(torch.zeros(1, dtype=torch.int64, device=self.device))  # else NCCL sets it up at the first request

    def through(self, calls: Calls) -> "GroupRanks":
        raise TypeError(f"{calls}: programs are for CPUs")

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if x.numel():
            self._wait(self._group.allreduce([x], _launched(c10d.AllreduceOptions())))
        total = times(x, scale)
        return total if residual is None else residual.add_(total)

    def gather(self, x: Tensor, width: int) -> Tensor:
        """Do as `Collective` says; ranks have the same number of columns, or one more."""
        (num_rows, own), size = x.shape, self.rank.size
        widest = -(-width // size)
        found = x.new_empty((size * num_rows, widest))
        padded = functional.pad(x, (0, widest - own)) if own < widest else x
        self._wait(self._group._allgather_base(found, padded, _launched(c10d.AllgatherOptions())))
        if self.rank.index:
            return x[:, :1].expand(-1, width)
        starts = [index * width // size for index in range(size + 1)]
        parts = zip(found.view(size, num_rows, widest), starts, starts[1:], strict=False)
        return torch.cat([part[:, : stop - start] for part, start, stop in parts], 1)

    def spread(self, x: Tensor) -> None:
        """Overwrite a tensor with the first rank's."""
        self._wait(self._group.broadcast([x], _launched(c10d.BroadcastOptions())))

    def check(self) -> None:
        """Do nothing: what is wrong has been raised, or waits for ever."""

    def _wait(self, work: c10d.Work | None) -> None:
        """Let what is launched next wait for an operation; on a CPU, wait for it."""
        if work is not None:
            work.wait()


def device_of_rank(device: "Device", index: int, num_ranks: int) -> torch.device:
    """Return where a rank computes, and let this thread use it; ConfigError where fewer devices are visible."""
    if device != "cuda":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible < num_ranks:
        raise ConfigError(f"tensor_parallel_size: {num_ranks} ranks need a GPU each, and {visible} are visible here")
    found = torch.device("cuda", index)
    torch.cuda.set_device(found)
    return found


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """End this process where a block takes longer: NCCL cannot be made to stop waiting for a rank that hangs."""

    def end() -> None:
        logger.critical("the device is broken: %s take longer than %g s: this process ends", what, limit_s)
        os._exit(DEVICE_EXIT_STATUS)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _interfaces_of(host: str) -> str:
    """Return the network interfaces that an address belongs to, as NCCL takes them."""
    if host == LOOPBACK:
        return "lo"
    from pdserve.kvtransfer.backends.ucx import Network  # noqa: PLC0415 - ranks of one machine have no need of it

    return Network(host).settings()["UCX_NET_DEVICES"]


def _gloo(store: c10d.Store, rank: Rank, limit: timedelta, host: str) -> Any:  # noqa: ANN401
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname=host)]
    store.set_timeout(limit)
    return gloo(store, rank.index, rank.size, options)


def _nccl(store: c10d.Store, rank: Rank, limit: timedelta, host: str) -> Any:  # noqa: ANN401
    os.environ.update(TORCH_SETTINGS)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_interfaces_of(host)}")
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = FOREVER
    store.set_timeout(limit)
    return nccl(store, rank.index, rank.size, options)


def _launched(options: Any) -> Any:  # noqa: ANN401
    """Return options with which an operation runs on the stream that computes, and not on one of NCCL's own."""
    options.asyncOp = False
    return options
