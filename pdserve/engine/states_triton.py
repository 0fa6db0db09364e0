"""States of sequences in pages, which Triton's kernels read and write; `states.py` says how they lie."""

import torch
from torch import Tensor

from pdserve.engine.batch import Chains, Ints
from pdserve.engine.states import Places
from pdserve.kernels.states import MAX_BLOCKED_KEY_DIM, PagedStates, StatesSpec
from pdserve.model.attention import Recurs
from pdserve.model.config import ModelConfig
from pdserve.model.layer_groups import LayerGroup
from pdserve.model.weights import Rank


def states_spec(config: ModelConfig, span: int, most: tuple[int, int], num_slabs: int = 1) -> StatesSpec:
    """Return what the kernels are to know of a model's states, up to a largest step.

    span: the tokens of a page. most: tokens of a step, and sequences. num_slabs: the parts of a state that a rank has.
    ValueError names what the kernels do not serve.
    """
    part = Rank(0, config.num_state_parts)
    found = [each.of_rank(part) for each in config.design.recurrent if each is not None]
    alike = {each.sizes for each in found}
    if len(alike) > 1:
        raise ValueError(f"layers keep states of {len(alike)} shapes, and the kernels serve one")
    (of,) = alike
    products = of.products if of.keys <= MAX_BLOCKED_KEY_DIM else 0
    return StatesSpec(len(found), of.inputs, of.memory, of.changes, span, *most, products=products, num_slabs=num_slabs)


class TritonStates:
    """Plans a step once, then serves each layer with a state. A captured step finds its plan where the last one was."""

    def __init__(
        self, config: ModelConfig, most: tuple[int, int], kv: Tensor, group: LayerGroup, places: Places
    ) -> None:
        """kv: the pool. most: tokens of a step, and sequences."""
        spec = states_spec(config, group.page_size, most, places.num_slabs)
        self._paged = PagedStates(kv.view(len(kv), -1).view(torch.float32), spec)
        self._places = {layer: place for place, layer in enumerate(group.layers)}

    def plan(self, chains: Chains) -> None:
        """Prepare what all layers share of the step."""
        self._paged.plan(chains.page_table, chains.query_lens, chains.kv_lens, chains.has_guesses)

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute one layer; see `pdserve.model.attention.Attention`."""
        recurrence = of.recurrence
        place = recurrence.state_part.slab * len(self._places) + self._places[layer]
        return self._paged.recur(recurrence, place, taken)

    def commit(self, num_kept: Ints | None = None) -> None:
        """Write the states of a step, behind its samples; see `KeepsStates`."""
        self._paged.keep(num_kept)
