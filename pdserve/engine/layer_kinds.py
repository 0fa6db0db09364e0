"""Layers of one kind share pages, a window and what becomes of scores: each kind has an attention of its own.

A runner's pool has a row of elements for each page. A group of layers sees it as pages of its own shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pdserve.engine.batch import Chains, Ints, PoolShape
from pdserve.engine.states import Places, States
from pdserve.kernels.cpu.attention import QkNorm
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.attention import Attends, Recurs
from pdserve.model.config import ModelConfig
from pdserve.model.design import Scores
from pdserve.model.family import Model
from pdserve.model.kv_heads import Heads
from pdserve.model.layer_groups import LayerGroup
from pdserve.model.rope import Rope
from pdserve.protocol.paging import PageShape, Paging


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers of one kind attend within."""

    group: int  # whose pages they have
    scores: Scores
    kv: Tensor  # [num_pages, layers of the group, kv_parts, a rank's KV heads, page_size, width of a row]
    ropes: tuple[Rope, ...]  # of each layer of the group
    rows: KvRows
    heads: Heads | None = None  # of a rank, where those of the model's layers are not alike
    is_read: bool = False  # whether other layers attend to keys and values that a layer of the group has written


class KeepsStates(Protocol):
    """The states of all layers that keep one: see `States`."""

    def plan(self, chains: Chains) -> None: ...

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor: ...

    def commit(self, num_kept: Ints | None = None) -> None:
        """Write the states of a step. num_kept: how many tokens of each chain are final; None: all."""
        ...


A = TypeVar("A", bound=Attends)
MakesStates = Callable[[Tensor, LayerGroup, Places], KeepsStates]


@dataclass(frozen=True, slots=True)
class ByLayer(Generic[A]):
    """The attention of all layers of a model, and the states of those that keep one."""

    parts: tuple[A, ...]  # of each kind
    groups: tuple[int, ...]  # of each kind: whose pages it has
    places: tuple[tuple[int, int], ...]  # of each layer: its kind, and the place in a group of what keeps its KV
    states: KeepsStates | None = None

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        """Attend in one layer; see `pdserve.model.attention.Attends`."""
        kind, place = self.places[layer]
        return self.parts[kind].run(place, qkv, qk_norm, sinks)

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute a layer with a state; see `pdserve.model.attention.Attention`."""
        assert self.states is not None, "the model has a group of states"
        return self.states.recur(layer, taken, of)


def by_layer(
    make: Callable[[LayerKind], A],
    model: Model,
    kv: Tensor,
    groups: Sequence[LayerGroup],
    rows: KvRows | None = None,
    make_states: MakesStates = States,
) -> ByLayer[A]:
    """Make an attention of each kind of layer that the model's rank has, over the heads that it has.

    kv: a pool of as many pages as its first dimension. rows: of the first group; in the model's type unless given.
    """
    config, ropes = model.config, model.ropes
    rows = rows or KvRows(config.head_dim, model.dtype)
    own_layers, readers = model.rank.layers(config.num_layers), config.design.readers
    kinds: dict[tuple[int, Scores], int] = {}
    parts, places, states = list[A](), [(0, 0)] * config.num_layers, None
    for number, group in enumerate(groups):
        if group.has_states:
            states = make_states(kv, group, _places(model, kv, group))
            continue
        view, own_rows, heads = pages_of(kv, config, group, rows.width), rows, group.heads
        if not group.num_kv_heads:
            view = view[:, :, :, model.rank.kv_heads(view.shape[3])]
        if heads is not None:
            heads, own_rows = replace(heads, num_kv_heads=view.shape[3]), replace(rows, head_dim=heads.head_dim)
        of_group = tuple([ropes[layer] for layer in group.layers])
        for place, layer in enumerate(group.layers):
            if layer not in own_layers:
                continue
            attention = config.design.attentions[layer]
            assert attention is not None, "others have no KV"
            scores = attention.scores
            if (number, scores) not in kinds:
                kinds[number, scores] = len(parts)
                is_read = not set(group.layers).isdisjoint(readers.values())
                parts.append(make(LayerKind(number, scores, view, of_group, own_rows, heads, is_read)))
            places[layer] = kinds[number, scores], place
    for layer, source in readers.items():
        places[layer] = places[source]
    return ByLayer(tuple(parts), tuple([group for group, _ in kinds]), tuple(places), states)


def _places(model: Model, kv: Tensor, group: LayerGroup) -> Places:
    parts, page = model.rank.kv_heads(model.config.num_state_parts), kv[0].nbytes // torch.float32.itemsize
    return Places.of(model.config, group, page, parts.stop - parts.start)


def pool_size(config: ModelConfig, num_pages: int, groups: Sequence[LayerGroup], width: int) -> tuple[int, ...]:
    """Return the dimensions of a pool: see `EngineRunner.kv`. width: of a row of the first group."""
    if len(groups) > 1:
        return num_pages, _page_elements(config, groups, width)
    (group,) = groups
    num_kv_heads = group.num_kv_heads or config.num_kv_heads
    return num_pages, group.num_layers, config.kv_parts, num_kv_heads, group.page_size, width


def pool_in(memory: Tensor, size: tuple[int, ...], *, by_head: bool) -> Tensor:
    """Return memory as a pool of these dimensions. by_head: its pages have one KV head behind the other."""
    if not by_head or len(size) == 2:  # of several groups: see `pages_of`
        return memory.view(size)
    num_pages, num_layers, parts, num_kv_heads, *run = size
    return memory.view(num_pages, num_kv_heads, num_layers, parts, *run).permute(0, 2, 3, 1, 4, 5)


def pool_shape(config: ModelConfig, num_pages: int, groups: Sequence[LayerGroup]) -> PoolShape:
    first, *others = (group.page_size for group in groups)
    return PoolShape(num_pages, first, config.vocab_size, tuple(others), config.has_states)


def _page_elements(config: ModelConfig, groups: Sequence[LayerGroup], width: int) -> int:
    """Return the elements of a page, as `KvLayout.page_bytes` counts them."""
    by_head = groups[0].num_kv_heads  # of a rank with memory of its own: each head has as much of the page
    own = [
        group.state_elements or group.num_layers * config.kv_parts * math.prod(_runs(config, group, width))
        for group in groups
    ]
    unit = groups[0].page_size * width * (by_head or 1)
    return -(-max(own) // unit) * unit


def pages_of(kv: Tensor, config: ModelConfig, group: LayerGroup, width: int) -> Tensor:
    """Return a pool as a group of layers sees it: see `LayerKind.kv`. width: of a row of the first group."""
    if kv.dim() > 2:  # of one group
        return kv
    num_kv_heads, *run = _runs(config, group, width)
    if group.num_kv_heads:  # one behind the other
        of_heads = kv.view(len(kv), group.num_kv_heads, -1)[..., : group.num_layers * config.kv_parts * math.prod(run)]
        return of_heads.view(*of_heads.shape[:2], group.num_layers, config.kv_parts, *run).permute(0, 2, 3, 1, 4, 5)
    shape = (group.num_layers, config.kv_parts, num_kv_heads, *run)
    return kv[:, : math.prod(shape)].view(len(kv), *shape)


def _runs(config: ModelConfig, group: LayerGroup, width: int) -> tuple[int, int, int]:
    """Return how many KV heads a layer of a group has in a page, their tokens, and the elements of a row."""
    own = config.with_heads(group.heads)
    return group.num_kv_heads or own.num_kv_heads, group.page_size, width + own.head_dim - config.head_dim


def paging_of(groups: Sequence[LayerGroup]) -> Paging:
    return Paging([PageShape(group.page_size, group.window, group.has_states) for group in groups])


def flat_rows(kv: Tensor, width: int) -> Tensor:
    """Return the elements of a pool as rows of `width`, from the first one of `kv` to the end of its last page.

    Pages may be longer than what a group sees of them, and have heads of other ranks.
    """
    num_elements = len(kv) * kv.stride(0) - kv.storage_offset() % kv.stride(0)
    return kv.as_strided((num_elements // width, width), (width, 1))
