"""Token ids to text, as they come.

Invariant: the texts returned for one sequence join to the decoding of all its ids, and no character is given
out before its last byte is there.
"""

import codecs
from collections.abc import Sequence

from pdserve.text.pieces import Pieces


class Detokenizer:
    """One sequence's text so far. Holds back at most the three bytes of an unfinished character."""

    __slots__ = ("_by_id", "_errors", "_pending", "_strip_space")

    def __init__(self, pieces: Pieces, *, at_start: bool) -> None:
        """Start a sequence. `at_start`: it begins a text, where SentencePiece hides a leading space."""
        self._by_id = pieces.by_id
        self._errors = pieces.encoding_errors
        self._strip_space = at_start and pieces.strips_first_space
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text they complete. Special and unknown ids add nothing."""
        texts = []
        for token_id in token_ids:
            piece = self._by_id[token_id] if 0 <= token_id < len(self._by_id) else ""
            if self._pending or isinstance(piece, bytes):
                piece = self._decode(piece.encode() if isinstance(piece, str) else piece, is_last=False)
            texts.append(piece)
        return self._begin("".join(texts)) if self._strip_space else "".join(texts)

    def flush(self) -> str:
        """End the sequence; return what an unfinished character is written as."""
        text = self._decode(b"", is_last=True) if self._pending else ""
        return self._begin(text) if self._strip_space else text

    def _decode(self, raw: bytes, *, is_last: bool) -> str:
        raw = self._pending + raw
        text, num_used = codecs.utf_8_decode(raw, self._errors, is_last)
        self._pending = raw[num_used:]
        return text

    def _begin(self, text: str) -> str:
        if text:
            self._strip_space = False
        return text.removeprefix(" ")
