"""The KV pages of an engine as plain memory, for movers and digests."""

import torch

from pdserve.engine.runner import Runner
from pdserve.kvtransfer.mover import Region


def kv_region(runner: Runner) -> Region:
    """Return the pages of a runner on the CPU: page i is row i of the view."""
    return Region.of(runner.kv.view(torch.uint8).view(len(runner.kv), -1).numpy())
