"""States of sequences in pages: what layers without attention keep of all tokens up to one.

The state group is a group of layers with a window of two tokens. Its page number i holds the state after the last
computed token of span i. So a token finds the state before it in the page of the token before it, the pages of earlier
spans are given up as behind any window, and a page of a full span is a snapshot which another sequence with the same
prefix goes on from.

Invariant: a step that fails has written no state. K and V may be written twice, a state may not: its tokens would
count twice. So states are written at the end of a step, by `commit`. Then it is also known which guesses were right:
there is a state behind each of them until then, and the one behind the last right one is written.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.batch import Chains, Ints
from pdserve.kernels.cpu.states import Recurrence
from pdserve.kernels.state_pieces import Pieces
from pdserve.model.attention import Advance, Recurs
from pdserve.model.config import ModelConfig
from pdserve.model.layer_groups import LayerGroup


@dataclass(frozen=True, slots=True)
class _Piece:
    """Equally many tokens of some chunks, none of which passes the end of a span."""

    chunks: Tensor  # int64 [count]
    tokens: Tensor  # int64 [count, length]: rows of the step
    pieces: Tensor  # int64 [count]: of the step's, in order


@dataclass(frozen=True, slots=True)
class _Step:
    of: Pieces
    before: Tensor  # int64 [num_chunks]: the pages of the states before the step
    begins: Tensor  # int64: the chunks without one
    pieces: tuple[_Piece, ...]  # those of a chunk in order


@dataclass(frozen=True, slots=True)
class Places:
    """Where states of layers lie in a page; counted in float32 values."""

    firsts: dict[int, int]  # of each layer, in a slab
    num_slabs: int  # parts of a state that a rank has
    slab: int  # values of one

    @classmethod
    def of(cls, config: ModelConfig, group: LayerGroup, page: int, num_slabs: int) -> Self:
        """page: values of one."""
        sizes = config.state_sizes
        firsts = accumulate([sizes[layer] for layer in group.layers], initial=0)
        return cls(dict(zip(group.layers, firsts, strict=False)), num_slabs, page // num_slabs)

    def first(self, layer: int, of: Recurrence) -> int:
        """Return the first value of a part of a layer's state."""
        return of.state_part.slab * self.slab + self.firsts[layer]


class States:
    """Plans a step once, then serves each layer with a state, in plain torch; see `states_compiled.py`."""

    def __init__(self, kv: Tensor, group: LayerGroup, places: Places) -> None:
        """kv: the pool."""
        self._rows = kv.view(len(kv), -1).view(torch.float32)
        self._span = group.page_size
        self._places = places
        self._step: _Step | None = None
        self._written: list[tuple[Tensor, slice, Tensor]] = []

    def plan(self, chains: Chains) -> None:
        """Prepare what all layers share of the step."""
        of = Pieces.of(chains.page_table, chains.query_lens, chains.kv_lens, self._span, chains.has_guesses)
        before, begins = np.maximum(of.before, 0), np.flatnonzero(of.before < 0)
        self._step = _Step(of, torch.from_numpy(before), torch.from_numpy(begins), _alike(of))
        self._written = []

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute one layer; see `pdserve.model.attention.Attention`."""
        return of.in_torch(taken, partial(self._recur, layer, of.recurrence))

    def commit(self, num_kept: Ints | None = None) -> None:
        """Write the states of a step whose tokens are all computed and sampled; see `KeepsStates`."""
        of = self._planned().of
        of_pieces = torch.from_numpy(of.pages if num_kept is None else of.kept(num_kept))
        for pieces, columns, after in self._written:
            pages = of_pieces[pieces]
            is_kept = pages >= 0
            self._rows[:, columns].index_copy_(0, pages[is_kept], after[is_kept])
        self._written = []

    def _planned(self) -> _Step:
        if self._step is None:
            raise RuntimeError("plan must be called first")
        return self._step

    def _recur(self, layer: int, of: Recurrence, rows: Tensor, advance: Advance) -> Tensor:
        step, parts = self._planned(), _columns(of, self._places.first(layer, of))
        states = [self._before(step, columns) for columns in parts]
        out: Tensor | None = None
        for piece in step.pieces:
            is_only = len(step.pieces) == 1  # of all chunks
            given = states if is_only else [part.index_select(0, piece.chunks) for part in states]
            made, after = advance(rows[piece.tokens], given)
            out = made.new_empty((len(rows), made.shape[-1])) if out is None else out
            out[piece.tokens] = made
            for columns, state, new in zip(parts, states, after, strict=True):
                widths = [each.stop - each.start for each in columns]
                self._written += zip(repeat(piece.pieces), columns, new.split(widths, 1), strict=False)
                if not is_only:
                    state.index_copy_(0, piece.chunks, new)
        assert out is not None, "a step has tokens"
        return out

    def _before(self, step: _Step, columns: Seq[slice]) -> Tensor:
        """Return a part of the states before a step."""
        found = torch.cat([self._rows[:, each].index_select(0, step.before) for each in columns], 1)
        return found.index_fill_(0, step.begins, 0.0)


def _columns(of: Recurrence, first: int) -> list[list[slice]]:
    """Return where a rank's parts of a layer's state lie: the last inputs, and a memory if there is one."""
    part, at = of.state_part, first + of.memory_at
    rows = [first + place * part.channels for place in range(len(of.weight) - 1)]
    inputs = [slice(row + run.start, row + run.stop) for row in rows for run in part.runs]
    return [inputs, [slice(at, at + of.memory)]] if of.memory else [inputs]


def _alike(of: Pieces) -> tuple[_Piece, ...]:
    """Return a step's pieces, the first ones of chunks first, and those of equal lengths together."""
    chunks = of.chunks[of.lasts]
    is_first = np.diff(chunks, prepend=-1) > 0
    firsts = np.where(is_first, of.starts[chunks], np.roll(of.lasts, 1) + 1)
    numbers = np.arange(len(chunks)) - np.flatnonzero(is_first)[chunks]
    lengths, found = of.lasts + 1 - firsts, []
    for number, length in sorted(set(zip(numbers.tolist(), lengths.tolist(), strict=True))):
        (pieces,) = np.nonzero((numbers == number) & (lengths == length))
        tokens = firsts[pieces, None] + np.arange(length)
        found.append(_Piece(*map(torch.from_numpy, (chunks[pieces], tokens, pieces))))
    return tuple(found)
