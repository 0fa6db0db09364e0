"""Where the states of a step lie: a piece of a sequence's tokens leaves a state behind.

A piece ends where its chunk does, or its span of tokens, which fills a page. In a chunk with guesses every token is a
piece: which of its states is kept turns out when the step has sampled. The state behind a guess that was wrong is kept
by nobody.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from pdserve.kernels.attention_plan import Ints
from pdserve.kernels.checks import require_lens, require_page_table

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The chunks of a step, and their pieces in order."""

    starts: Ints  # [num_chunks + 1]: a chunk's first token, and the end
    chunks: Ints  # [num_tokens]: of which chunk a token is
    places: Ints  # [num_tokens]: of a token in its chunk
    positions: Ints  # [num_tokens]: in its sequence
    before: Ints  # [num_chunks]: the page of the state before a chunk; below 0: there is none
    ended: Ints  # [num_tokens]: the piece that ends with a token; below 0: none does
    lasts: Ints  # [num_pieces]: its last token
    pages: Ints  # [num_pieces]: where the state behind it belongs
    fills: Bools  # [num_pieces]: it ends a span

    @classmethod
    def of(cls, page_table: Ints, query_lens: Ints, kv_lens: Ints, span: int, has_guesses: Bools | None = None) -> Self:
        """Find the pieces of chunks. page_table: [num_chunks, spans]; query_lens, kv_lens, has_guesses: [num_chunks].

        kv_lens count the chunk's own tokens. ValueError where lengths or the table do not fit each other.
        """
        require_lens(query_lens, kv_lens)
        require_page_table(page_table, kv_lens, span)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(query_lens)))
        chunks = np.repeat(np.arange(len(query_lens)), query_lens)
        places = np.arange(starts[-1]) - starts[chunks]
        first = kv_lens - query_lens
        positions = first[chunks] + places
        fills = (positions + 1) % span == 0
        is_end = (positions + 1 == kv_lens[chunks]) | fills
        if has_guesses is not None:
            is_end |= has_guesses[chunks]
        lasts = np.flatnonzero(is_end)
        found = np.take_along_axis(page_table, np.maximum(first - 1, 0)[:, None] // span, 1)[:, 0]
        return cls(
            starts=starts,
            chunks=chunks,
            places=places,
            positions=positions,
            before=np.where(first > 0, found, -1),
            ended=np.where(is_end, np.cumsum(is_end) - 1, -1),
            lasts=lasts,
            pages=page_table[chunks[lasts], positions[lasts] // span],
            fills=fills[lasts],
        )

    def kept(self, num_kept: Ints) -> Ints:
        """Return the page of each piece whose state is kept, and -1 for the others.

        num_kept: [num_chunks], how many of a chunk's tokens are final, at least one.
        """
        places, num_final = self.places[self.lasts], num_kept[self.chunks[self.lasts]]
        is_kept = (places + 1 == num_final) | (self.fills & (places < num_final))
        return np.where(is_kept, self.pages, -1)
