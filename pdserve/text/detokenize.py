"""Token ids to text, as they come.

Invariant: the texts returned for one sequence join to the decoding of all its ids, and no character is given out before
its last byte is there.

A tokenizer's decoder turns a list of tokens into a text. In the two kinds of decoders that Llama-family models use,
each token stands for a run of bytes, and the joined runs are UTF-8. A table made once per model holds these runs.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from pdserve.base.errors import ConfigError

WORD_START = "\u2581"  # how SentencePiece writes a space

Piece = str | bytes  # bytes if they are no UTF-8 text on their own


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tables. Entries are empty for ids no token has, and those of special tokens in `by_id`."""

    by_id: tuple[Piece, ...]
    with_special: tuple[Piece, ...]
    encoding_errors: str  # the codec's name for how a byte that is no UTF-8 is written
    strips_first_space: bool  # of a text that begins with it


def read_pieces(backend: tokenizers.Tokenizer) -> Pieces:
    """Build the table of a tokenizer; ConfigError if its decoder is of another kind."""
    decoder = _decoder_steps(backend)
    kinds = [step["type"] for step in decoder]
    special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    convert = _from_byte_level if kinds == ["ByteLevel"] else _from_sentencepiece
    everything = tuple(
        _text_if_whole(convert(tokens[token_id])) if token_id in tokens else ""
        for token_id in range(max(tokens, default=-1) + 1)
    )
    by_id = tuple("" if token_id in special else piece for token_id, piece in enumerate(everything))
    if kinds == ["ByteLevel"]:
        return Pieces(by_id, everything, "replace", strips_first_space=False)
    return Pieces(by_id, everything, EACH_BYTE, strips_first_space=kinds[-1] == "Strip")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    state = backend.decoder.__getstate__() if backend.decoder is not None else b'{"type": "none"}'
    decoder = json.loads(state)
    steps: list[dict[str, object]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    known: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": WORD_START}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    if steps not in (known, known[:-1]) and [step["type"] for step in steps] != ["ByteLevel"]:
        names = ", ".join(str(step["type"]) for step in steps)
        raise ConfigError(f"tokenizer decoder: {names} is not supported (ByteLevel, or SentencePiece's)")
    return steps


def _text_if_whole(raw: bytes) -> Piece:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable Latin-1 as it is, the others as code points from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()  # an added token, written as it is


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # looks like a byte, but is a word
    return token.replace(WORD_START, " ").encode()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


EACH_BYTE = "pdserve.replace-each-byte"
codecs.register_error(EACH_BYTE, _replace_each_byte)


class Detokenizer:
    """Decodes one sequence. Holds back at most the three bytes of an unfinished character."""

    __slots__ = ("_by_id", "_errors", "_pending", "_strip_space")

    def __init__(self, pieces: Pieces, *, at_start: bool, skip_special: bool = True) -> None:
        """Start a sequence. `at_start`: it begins a text, where SentencePiece hides a leading space."""
        self._by_id = pieces.by_id if skip_special else pieces.with_special
        self._errors = pieces.encoding_errors
        self._strip_space = at_start and pieces.strips_first_space
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text they complete. Unknown ids add nothing."""
        texts = []
        for token_id in token_ids:
            piece = self._by_id[token_id] if 0 <= token_id < len(self._by_id) else ""
            if self._pending or isinstance(piece, bytes):
                piece = self._decode(piece.encode() if isinstance(piece, str) else piece, is_last=False)
            texts.append(piece)
        return self._begin("".join(texts)) if self._strip_space else "".join(texts)

    def flush(self) -> str:
        """End the sequence; return the replacement of an unfinished character, if there is one."""
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
