"""Memory for KV pages of the ranks of a worker: one that all of them map, or one of each rank (`rank_memory`).

Such memory has no name, and ends with the last process that has mapped it.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import ChosenQuantization
from pdserve.executor.form import KERNEL_DEVICES, untried_kind
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.routes import Share
from pdserve.model.config import ModelConfig
from pdserve.model.weights import Rank
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import Device
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
    if kind := untried_kind(model, **{"layers in several groups": bool(layout.others)}):
        raise ConfigError(f"rank_memory: own is not served for a model with {kind}")
    if degrees.tensor > model.num_kv_heads:
        heads = f"{degrees.tensor} ranks of {model.num_kv_heads} KV heads, some of which several ranks would hold"
        raise ConfigError(f"rank_memory: own is not served for {heads}")
    return replace(layout, page_digest="xxh3_runs")


def check_on_devices(degrees: Degrees, device: Device, quantization: ChosenQuantization) -> None:
    """Raise ConfigError where ranks with devices of their own were not compared with one that has all."""
    if degrees.num_ranks > 1 and device in KERNEL_DEVICES and quantization != "none":
        raise ConfigError(f"quantization: {quantization} is not served by {degrees} on {device} yet; none is")


def share_of(rank: Rank, layout: KvLayout) -> Share:
    """Return what a rank with memory of its own holds of each page."""
    layers, heads = rank.layers(layout.num_layers), rank.kv_heads(layout.num_kv_heads)
    return Share((layers.start, layers.stop), (heads.start, heads.stop))


def rank_page_bytes(layout: KvLayout, rank: Rank) -> int:
    """Return the bytes of a rank's part of a page."""
    return layout.page_bytes // share_of(Rank(), layout).num_runs * share_of(rank, layout).num_runs


def shares_of(degrees: Degrees, layout: KvLayout) -> tuple[Share, ...]:
    return tuple([share_of(Rank.at(index, degrees), layout) for index in range(degrees.num_ranks)])


def regions_of(memories: Sequence[Tensor], degrees: Degrees, layout: KvLayout) -> tuple[Region, ...]:
    """Return the memory of each rank as a region. memories: uint8, of as many pages each."""
    whole, num_pages = share_of(Rank(), layout), sum([len(each) for each in memories]) // layout.page_bytes
    views = [memory.view(num_pages, -1).numpy() for memory in memories]
    shares = shares_of(degrees, layout)
    return tuple([Region.of_rank(view, share, whole) for view, share in zip(views, shares, strict=True)])
