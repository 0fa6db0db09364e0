"""Which layers of a model keep their KV in pages of their own, so that pages may leave a window. Free of torch.

All pages of a pool have the same number of bytes (`protocol.paging`). Layers that see all tokens come first. Layers
with a window come second if their pages can be filled: where a token takes r times as many bytes in them, a page of the
first group holds r times as many tokens. Other layers with windows stay in the first group: what they see is the same,
but their pages are kept.

A layer that reads keys and values of another one has no place in a group: it attends within the pages of that one.

Layers that keep a state of a sequence are a group, too (`engine/states.py`). Its page holds one state, so pages of the
first group hold as many tokens as take the bytes of a state. A layer may be in both groups.
"""

import math
from dataclasses import replace

from pdserve.base.errors import ConfigError
from pdserve.base.values import value
from pdserve.model.config import ModelConfig, heads_of
from pdserve.model.kv_heads import Heads
from pdserve.model.weights import Rank
from pdserve.protocol.kvlayout import MOST_UNUSED

STATE_WINDOW = 2  # a token needs the state after the one before it
STATE_ITEM = 2  # elements of a pool that hold a float32; those of float32 have room to spare
LARGEST_POWER = 128  # tokens in a page, as kernels on GPUs have it


@value
class LayerGroup:
    """Layers whose KV lies in the same pages."""

    name: str  # "full", "window", "state"
    layers: tuple[int, ...]  # places in the model, rising
    page_size: int  # tokens
    window: int | None = None  # that all of them have; None: their pages are kept
    state_elements: int = 0  # of a page, of two bytes; 0: it has a row for each token
    num_head_layers: int = 0  # of a drafting head, behind these
    num_kv_heads: int = 0  # in these pages, of a rank with memory of its own; 0: all that the layers have
    heads: Heads | None = None  # of these layers, where the model's are not alike

    @property
    def num_layers(self) -> int:
        return len(self.layers) + self.num_head_layers

    @property
    def has_states(self) -> bool:
        return self.state_elements > 0


def layer_groups(config: ModelConfig, page_size: int, *, powers_of_two: bool = False) -> tuple[LayerGroup, ...]:
    """Return the groups of a model; pages of the smallest hold `page_size` tokens.

    powers_of_two: page sizes are powers of two up to 128, as kernels on GPUs want them: some may be smaller, then.
    With states they may be multiples of 128.
    """
    if config.has_states:
        return _with_states(config, page_size, powers_of_two=powers_of_two)
    keeping = _keeping(config)
    found = {window for window in keeping.values() if window is not None}
    full = tuple(place for place, window in keeping.items() if window is None)
    sliding = tuple(place for place, window in keeping.items() if window is not None)
    if full and len(found) == 1:
        num_full = _features(config, full) + config.num_head_layers * config.num_kv_heads * config.head_dim
        num_sliding = _features(config, sliding)
        ratio = max(1, round(num_sliding / num_full))
        if powers_of_two:
            ratio = 1 << round(math.log2(ratio))
            page_size = min(page_size, LARGEST_POWER // ratio)
        larger, smaller = max(ratio * num_full, num_sliding), min(ratio * num_full, num_sliding)
        heads = heads_of(config.design, full), heads_of(config.design, sliding)
        if smaller >= larger * (1 - MOST_UNUSED) and _are_whole(config, heads, ratio):
            (window,) = found
            return (
                LayerGroup("full", full, ratio * page_size, None, 0, config.num_head_layers, heads=heads[0]),
                LayerGroup("window", sliding, page_size, window, heads=heads[1]),
            )
    if config.has_unlike_heads:
        raise ConfigError("layer_types: layers with heads of two sizes are served where both fill pages of equal bytes")
    return (LayerGroup("full", tuple(keeping), page_size, num_head_layers=config.num_head_layers),)


def _keeping(config: ModelConfig) -> dict[int, int | None]:
    """Return the layers that keep keys and values of their own, rising, and the window of each."""
    attentions, readers = config.design.attentions, config.design.readers
    return {
        place: each.scores.window for place, each in enumerate(attentions) if each is not None and place not in readers
    }


def _features(config: ModelConfig, layers: tuple[int, ...]) -> int:
    """Return the features of keys of a token in layers that have the same heads."""
    own = config.with_heads(heads_of(config.design, layers))
    return len(layers) * own.num_kv_heads * own.head_dim


def _are_whole(config: ModelConfig, heads: tuple[Heads | None, Heads | None], ratio: int) -> bool:
    """Say whether rows of a second group are whole where pages end with rows of a first one, `ratio` times as many."""
    first, second = (config.with_heads(each).head_dim for each in heads)
    return ratio * first % second == 0


def held_by(rank: Rank, config: ModelConfig, groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """Return what a rank with memory of its own has of a model's groups: its layers, and its KV heads of each."""
    own, heads = rank.layers(config.num_layers), rank.kv_heads(config.num_kv_heads)
    count, held = heads.stop - heads.start, list[LayerGroup]()
    for group in groups:
        layers = tuple([layer for layer in group.layers if layer in own])
        elements = group.state_elements // config.num_kv_heads * count
        held.append(replace(group, layers=layers, num_kv_heads=count, state_elements=elements))
    return tuple(held)


def _with_states(config: ModelConfig, page_size: int, *, powers_of_two: bool) -> tuple[LayerGroup, ...]:
    """Return the groups of a model some of whose layers keep a state."""
    sizes, full = config.state_sizes, tuple(_keeping(config))
    elements = STATE_ITEM * config.num_state_parts * sum(sizes)
    num_heads = config.num_head_layers
    token = (len(full) + num_heads) * config.kv_parts * config.num_kv_heads * config.head_dim
    needed = -(-elements // token)
    if powers_of_two:
        page_size = max(page_size, min(LARGEST_POWER, 1 << (needed - 1).bit_length()))
    page_size *= -(-needed // page_size)
    keeping = tuple(place for place, size in enumerate(sizes) if size)
    first = LayerGroup("full", full, page_size, num_head_layers=num_heads)
    return first, LayerGroup("state", keeping, page_size, STATE_WINDOW, elements)
