"""The KV pages of an engine as memory that movers write to and digests are taken of.

Only memory that the CPU can address, so far. GPU memory needs a region that names its segment to NIXL (VRAM_SEG) and
digests that `kernels.pageio.page_digests` computes in place; both ends of a hand-off must then agree on that digest.
"""

import torch

from pdserve.config import Device
from pdserve.errors import ConfigError
from pdserve.kvtransfer.mover import Region
from pdserve.worker.boot import EngineRunner


def require_movable(device: Device) -> None:
    """Raise ConfigError if pages of an engine on `device` cannot be handed off."""
    if device == "cuda":
        raise ConfigError("device: cuda is not supported by workers: pages in GPU memory cannot be handed off")


def kv_region(runner: EngineRunner) -> Region:
    """Return the pages of a runner on the CPU: page i is row i of the view."""
    return Region.of(runner.kv.view(torch.uint8).view(len(runner.kv), -1).numpy())
