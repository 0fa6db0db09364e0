"""States of sequences in pages, which the compiled library reads and writes; `states.py` says how they lie."""

from typing import Self

import torch
from torch import Tensor

from pdserve.engine.batch import Chains, Ints
from pdserve.engine.states import Places
from pdserve.kernels.cpu.calls import Calls, Program
from pdserve.kernels.cpu.states import Kept, PagedStates
from pdserve.model.attention import Recurs
from pdserve.model.layer_groups import LayerGroup


class CompiledStates:
    """Plans a step once, then serves each layer with a state; `States` does the same in torch."""

    def __init__(self, calls: Calls, keeping: Calls, paged: PagedStates, places: Places) -> None:
        """keeping: of what `commit` does."""
        self._calls = calls
        self._keeping = keeping
        self._paged = paged
        self._places = places
        self._kept: list[Kept] = []
        self._recorded: tuple[Program, int] | None = None

    @classmethod
    def of(cls, calls: Calls, kv: Tensor, group: LayerGroup, places: Places) -> Self:
        """kv: the pool."""
        return cls(calls, calls, PagedStates(kv.view(len(kv), -1).view(torch.float32), group.page_size), places)

    def planned(self, calls: Program, keeping: Program) -> "CompiledStates":
        """Return these states through other calls, for steps of short chunks; `commit` then records `keeping`."""
        return CompiledStates(calls, keeping, self._paged, self._places)

    def plan(self, chains: Chains) -> None:
        """Prepare what all layers share of the step."""
        self._paged.plan(chains.page_table, chains.query_lens, chains.kv_lens, chains.has_guesses)
        self._kept, self._recorded = [], None

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute one layer; see `pdserve.model.attention.Attention`."""
        recurrence = of.recurrence
        out, kept = self._paged.recur(self._calls, recurrence, self._places.first(layer, recurrence), taken)
        self._kept.append(kept)
        return out

    def computed(self, keeping: Program, num_rows: int) -> None:
        """Note that a program computes the planned step, and that `keeping` is to write its states."""
        self._recorded = keeping, num_rows

    def commit(self, num_kept: Ints | None = None) -> None:
        """Write the states of a step whose tokens are all computed and sampled; see `KeepsStates`."""
        if num_kept is not None:
            self._paged.drop(num_kept)
        if self._recorded is not None:
            keeping, num_rows = self._recorded
            keeping.run(num_rows)
        for kept in self._kept:
            self._keeping.take(1, kept.call)
        if self._keeping is self._calls:  # a program's calls use their memory as long as it is there
            self._kept, self._recorded = [], None
