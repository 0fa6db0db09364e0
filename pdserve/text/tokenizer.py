"""One model's tokenizer, as the router and the command line use it."""

from collections.abc import Sequence

import tokenizers

from pdserve.errors import invalid
from pdserve.text.detokenize import Detokenizer, read_pieces
from pdserve.text.words import MAX_TEXT, Words, may_cut


class Tokenizer:
    """Text to ids and ids to text. Immutable; threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None) -> None:
        self._backend = backend
        self._pieces = read_pieces(backend)
        self._words = Words(backend) if may_cut(backend) else None
        self._adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.vocab_size = len(self._pieces.by_id)

    def encode(self, text: str, *, add_special: bool, field: str = "prompt") -> list[int]:
        """Return the ids of `text`; with `add_special`, also the ends the model expects, bos never twice.

        About a second for a megabyte. Raises RequestError naming `field` for text that is no Unicode.
        """
        try:
            ids = self._encode(text, add_special)
        except TypeError as error:
            raise invalid(field, "holds half of a surrogate pair, which is no character") from error
        if add_special and self._adds_bos and ids[1:2] == ids[:1]:
            return ids[1:]
        return ids

    def _encode(self, text: str, add_special: bool) -> list[int]:
        if self._words is not None and len(text) <= MAX_TEXT:
            return self._words.encode(text, add_special=add_special)
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)  # without offsets
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all ids, special tokens left out."""
        detokenizer = self.detokenizer(at_start=True)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, at_start: bool, skip_special: bool = True) -> Detokenizer:
        """Start decoding a sequence; `at_start` is False where its text goes on from a prompt's."""
        return Detokenizer(self._pieces, at_start=at_start, skip_special=skip_special)

    def piece(self, token_id: int) -> bytes:
        """Return what a token adds to a text, special ones too; nothing for an id that no token has."""
        pieces = self._pieces.with_special
        piece = pieces[token_id] if 0 <= token_id < len(pieces) else b""
        return piece.encode() if isinstance(piece, str) else piece

    def to_json(self) -> str:
        """Return it as the tokenizers library writes it to a file."""
        text: str = self._backend.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found
