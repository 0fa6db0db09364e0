"""States of sequences in pages, which Triton's kernels read and write; `states.py` says how they lie."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pdserve.engine.batch import Chains, Ints
from pdserve.kernels.states import MAX_BLOCKED_KEY_DIM, PagedStates, StatesSpec
from pdserve.model.attention import Recurs
from pdserve.model.config import ModelConfig
from pdserve.model.layer_groups import LayerGroup


def states_spec(config: ModelConfig, span: int, max_tokens: int, max_seqs: int) -> StatesSpec:
    """Return what the kernels are to know of a model's states, up to a largest step.

    span: the tokens of a page. ValueError names what the kernels do not serve.
    """
    found = [each for each in config.design.recurrent if each is not None]
    alike = {(each.state_parts, each.changes, each.products, each.keys) for each in found}
    if len(alike) > 1:
        raise ValueError(f"layers keep states of {len(alike)} shapes, and the kernels serve one")
    ((parts, changes, products, keys),) = alike
    products = products if keys <= MAX_BLOCKED_KEY_DIM else 0
    return StatesSpec(len(found), parts[0], sum(parts[1:]), changes, span, max_tokens, max_seqs, products=products)


class TritonStates:
    """Plans a step once, then serves each layer with a state. A captured step finds its plan where the last one was."""

    def __init__(
        self, config: ModelConfig, limits: tuple[int, int], kv: Tensor, group: LayerGroup, parts: Seq[tuple[int, ...]]
    ) -> None:
        """kv: the pool. limits: the most tokens of a step, and sequences."""
        del parts  # the spec has them
        spec = states_spec(config, group.page_size, *limits)
        self._paged = PagedStates(kv.view(len(kv), -1).view(torch.float32), spec)
        self._places = {layer: place for place, layer in enumerate(group.layers)}

    def plan(self, chains: Chains) -> None:
        """Prepare what all layers share of the step."""
        self._paged.plan(chains.page_table, chains.query_lens, chains.kv_lens, chains.has_guesses)

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute one layer; see `pdserve.model.attention.Attention`."""
        return self._paged.recur(of.recurrence, self._places[layer], taken)

    def commit(self, num_kept: Ints | None = None) -> None:
        """Write the states of a step, behind its samples; see `KeepsStates`."""
        self._paged.keep(num_kept)
