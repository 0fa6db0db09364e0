"""States of sequences in pages: what layers without attention keep of all tokens up to one.

The state group is a group of layers with a window of two tokens. Its page number i holds the state after the last
computed token of span i. So a token finds the state before it in the page of the token before it, the pages of earlier
spans are given up as behind any window, and a page of a full span is a snapshot which another sequence with the same
prefix goes on from.

Invariant: a step that fails has written no state. K and V may be written twice, a state may not: its tokens would
count twice. So states are written at the end of a step, by `commit`.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.batch import Batch, Ints
from pdserve.model.attention import Advance, Recurs
from pdserve.model.layer_groups import LayerGroup


@dataclass(frozen=True, slots=True)
class _Piece:
    """Equally many tokens of some chunks, none of which passes the end of a span."""

    chunks: Tensor  # int64 [count]
    tokens: Tensor  # int64 [count, length]: rows of the step
    pages: Tensor  # int64 [count]: where the states after them belong


@dataclass(frozen=True, slots=True)
class _Step:
    pages: Tensor  # int64 [num_chunks]: where the states before the step are
    begins: Tensor  # int64: the chunks without one
    pieces: tuple[_Piece, ...]  # those of a chunk in order


class States:
    """Plans a step once, then serves each layer with a state, in plain torch; see `states_compiled.py`."""

    def __init__(self, kv: Tensor, group: LayerGroup, parts: Seq[tuple[int, ...]]) -> None:
        """kv: the pool. parts: float32 values of each part of a state, in each layer of the model."""
        self._rows = kv.view(len(kv), -1).view(torch.float32)
        self._span = group.page_size
        self._columns: dict[int, tuple[slice, ...]] = {}
        first = 0
        for layer in group.layers:
            ends = list(accumulate(parts[layer], initial=first))
            self._columns[layer] = tuple([slice(*each) for each in pairwise(ends)])
            first = ends[-1]
        self._step: _Step | None = None
        self._written: list[tuple[Tensor, slice, Tensor]] = []

    def plan(self, batch: Batch) -> None:
        """Prepare what all layers share of the step. batch: as the state group sees it."""
        starts = batch.kv_lens - batch.query_lens
        places = np.maximum(starts - 1, 0) // self._span
        pages = np.take_along_axis(batch.page_table, places[:, None], 1)[:, 0]
        begins = np.flatnonzero(starts == 0)
        self._step = _Step(torch.from_numpy(pages), torch.from_numpy(begins), self._pieces(batch, starts))
        self._written = []

    def recur(self, layer: int, taken: Tensor, of: Recurs) -> Tensor:
        """Compute one layer; see `pdserve.model.attention.Attention`."""
        return of.in_torch(taken, partial(self._recur, layer))

    def commit(self) -> None:
        """Write the states of a step whose tokens are all computed and sampled."""
        for pages, columns, after in self._written:
            self._rows[:, columns].index_copy_(0, pages, after)
        self._written = []

    def _recur(self, layer: int, rows: Tensor, advance: Advance) -> Tensor:
        step, columns = self._step, self._columns[layer]
        if step is None:
            raise RuntimeError("recur before plan")
        states = [self._rows[:, part].index_select(0, step.pages).index_fill_(0, step.begins, 0.0) for part in columns]
        out: Tensor | None = None
        for piece in step.pieces:
            is_only = len(step.pieces) == 1  # of all chunks
            given = states if is_only else [part.index_select(0, piece.chunks) for part in states]
            made, after = advance(rows[piece.tokens], given)
            out = made.new_empty((len(rows), made.shape[-1])) if out is None else out
            out[piece.tokens] = made
            for part, state, new in zip(columns, states, after, strict=True):
                self._written.append((piece.pages, part, new))
                if not is_only:
                    state.index_copy_(0, piece.chunks, new)
        assert out is not None, "a step has tokens"
        return out

    def _pieces(self, batch: Batch, starts: Ints) -> tuple[_Piece, ...]:
        """Cut chunks at the ends of spans; first pieces come first, and those of equal lengths together."""
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        ends, size = batch.kv_lens.tolist(), self._span
        for chunk, (first, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            shift = int(batch.query_starts[chunk]) - first
            cuts = [first, *range((first // size + 1) * size, end, size), end]
            for number, (start, stop) in enumerate(pairwise(cuts)):
                page = int(batch.page_table[chunk, start // size])
                found.setdefault((number, stop - start), []).append((chunk, start + shift, page))
        pieces = []
        for key in sorted(found):
            chunks, firsts, pages = torch.tensor(found[key]).unbind(1)
            pieces.append(_Piece(chunks, firsts[:, None] + torch.arange(key[1]), pages))
        return tuple(pieces)
