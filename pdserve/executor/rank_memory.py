"""Memory for KV pages of the ranks of a worker: one that all of them map, or one of each rank (`rank_memory`).

Such memory has no name, and ends with the last process that has mapped it. A rank alone maps what is its own.
"""

import mmap
import os
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.engine.runner import zeroed
from pdserve.executor.form import KERNEL_DEVICES, untried_kind
from pdserve.executor.rank_frames import OwnPages
from pdserve.kernels.cpu.layers import INPUT_BITS
from pdserve.kvtransfer.device_region import device_region
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.routes import Share
from pdserve.model.config import ModelConfig
from pdserve.model.cuts import check_cuts
from pdserve.model.weights import Rank, Weights
from pdserve.protocol.kvlayout import RUNS, KvLayout
from pdserve.settings.config import WorkerConfig
from pdserve.settings.degrees import Degrees


def new_pages(num_bytes: int) -> int:
    """Return the descriptor of zeroed memory; it comes when it is first written to."""
    descriptor = os.memfd_create("pdserve-pages", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped_pages(descriptor: int) -> Tensor:
    """Return the memory, uint8, and close the descriptor."""
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8))
    finally:
        os.close(descriptor)


def own_layout(model: ModelConfig, layout: KvLayout, degrees: Degrees) -> KvLayout:
    """Return the layout of pages that ranks keep in memory of their own.

    ConfigError where such ranks were not compared with one that has all.
    """
    if kind := untried_kind(model, **{"latent rows": False, "states": False}):
        raise ConfigError(f"rank_memory: own is not served for a model with {kind}")
    if layout.others and degrees.pipeline > 1:
        raise ConfigError(f"rank_memory: own is not served for {degrees} of a model with layers in several groups")
    layout = replace(layout, page_digest=RUNS[layout.page_digest])
    share = own_pages(Rank.at(0, degrees), layout).share
    if share.num_copies > share.num_layers:  # each is to send some of them
        few = f"{share.num_copies} ranks that hold the same {share.num_layers} runs of a page"
        raise ConfigError(f"rank_memory: own is not served for {few}")
    return layout


def num_copies(layout: KvLayout, degrees: Degrees) -> int:
    """Return how many copies of each page the memory of a worker's ranks holds."""
    return own_pages(Rank.at(0, degrees), layout).share.num_copies if layout.is_by_head else 1


def check_on_devices(config: WorkerConfig, model: ModelConfig, weights: Weights) -> None:
    """Raise ConfigError where ranks with devices of their own were not compared with one that has all.

    weights: in the form in which ranks hold them.
    """
    if config.degrees.num_ranks == 1 or config.device not in KERNEL_DEVICES:
        return
    if config.quantized_inputs != INPUT_BITS:
        asked = f"quantized_inputs: {config.quantized_inputs}"
        raise ConfigError(f"{asked} is not served by {config.degrees} on {config.device}; {INPUT_BITS} is")
    check_cuts(model, weights, config.degrees)


def own_pages(rank: Rank, layout: KvLayout) -> OwnPages:
    """Return what a rank with memory of its own holds of each page."""
    share, whole = _share_of(rank, layout), _share_of(Rank(), layout)
    return OwnPages(share, whole, layout.page_bytes // whole.num_runs)


def device_pages(num_pages: int, own: OwnPages, device: torch.device) -> tuple[Tensor, Region]:
    """Return zeroed memory for a rank's pages on its device, uint8, and the same as a region."""
    memory = zeroed((num_pages * own.page_bytes,), torch.uint8, device)
    return memory, region_of(memory, own)


def region_of(memory: Tensor, own: OwnPages) -> Region:
    """Return the memory of a rank's pages as a region. memory: uint8."""
    view = memory.view(-1, own.page_bytes)
    if view.device.type == "cpu":
        return Region.of_rank(view.numpy(), own.share, own.whole)
    return device_region(view, own.share, own.whole)


def _share_of(rank: Rank, layout: KvLayout) -> Share:
    """Return a rank's share. Pages of several groups have runs of the first one's K or V in place of its layers."""
    num_runs = layout.page_bytes // (layout.num_kv_heads * layout.run_bytes)
    layers = rank.layers(num_runs if layout.others else layout.num_layers)
    heads, copies = rank.kv_heads(layout.num_kv_heads), max(1, rank.size // layout.num_kv_heads)
    return Share((layers.start, layers.stop), (heads.start, heads.stop), rank.index % copies, copies)


def rank_page_bytes(layout: KvLayout, rank: Rank) -> int:
    """Return the bytes of a rank's part of a page."""
    return own_pages(rank, layout).page_bytes
