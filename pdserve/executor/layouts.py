"""How a worker's pages lie in memory, by its settings and its model's config."""

from pdserve.executor.form import KERNEL_DEVICES, choose_kv_code
from pdserve.executor.rank_memory import own_layout
from pdserve.model.config import ModelConfig
from pdserve.model.layer_groups import LayerGroup, layer_groups
from pdserve.protocol.kvlayout import KvGroup, KvLayout, PageDigest
from pdserve.settings.config import Device, WorkerConfig


def layout_of(config: WorkerConfig, model: ModelConfig, dtype: str, weights_hash: str = "") -> KvLayout:
    """Return how a worker's pages lie in memory, by its settings; see `describe_layout`. dtype: of computing."""
    kept = choose_kv_code(config.kv_cache_dtype, model) or dtype
    layout = describe_layout(model, weights_hash, config.page_size, kept, config.device)
    return own_layout(model, layout, config.degrees) if config.rank_memory == "own" else layout


def describe_layout(model: ModelConfig, weights_hash: str, page_size: int, dtype: str, device: Device) -> KvLayout:
    """Return how pages of a model lie in memory; ConfigError where routers would refuse them.

    weights_hash: of what fills them. dtype: of K and V in pages.
    """
    first, *others = layer_groups(model, page_size, powers_of_two=device in KERNEL_DEVICES)
    layout = KvLayout(
        weights_hash=weights_hash,
        num_layers=first.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=first.page_size,
        dtype=dtype,
        page_digest=page_digest(device),
        others=tuple([_kv_group(of, model) for of in others]),
        kv_parts=model.kv_parts,
    )
    layout.check()
    return layout


def _kv_group(of: LayerGroup, model: ModelConfig) -> KvGroup:
    own = model.with_heads(of.heads)
    heads = (own.num_kv_heads, own.head_dim)
    return KvGroup(of.name, len(of.layers), *heads, of.page_size, of.window, model.kv_parts, of.state_elements)


def page_digest(device: Device) -> PageDigest:
    """Return what digests of pages are taken with: what is quick where the pages are."""
    return "splitmix64" if device == "cuda" else "xxh3"
