"""How few tokens a text can have, told from its length alone.

Invariant: a tokenizer never encodes a text in fewer tokens than `Fewest.of` says. Every token covers
at most as much text as the longest one. This bounds the tokenizers that `fewest` knows: no step of theirs drops text,
and none puts text of any length into one token.
"""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from pdserve.text.detokenize import BYTE_OF

NFC_SHRINKS = 4  # bytes become at most 3.5 times fewer in normalization form C, by the tables of Unicode
_NFC = {"type": "NFC"}
_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop nothing


@dataclass(frozen=True, slots=True)
class Fewest:
    """How much text one token covers at most."""

    longest: int  # in bytes of UTF-8, or in characters
    in_bytes: bool
    dropped: bytes = b""  # those that the vocabulary lacks: they add no token
    nfc: bool = False  # the text is normalized first

    def of(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        if not self.in_bytes:
            return -(-len(text) // self.longest)
        length = len(text.encode(errors="surrogatepass").translate(None, self.dropped))
        shrinks = NFC_SHRINKS if self.nfc and not text.isascii() else 1
        return -(-length // (self.longest * shrinks))


def fewest(backend: tokenizers.Tokenizer) -> Fewest | None:
    """Return the bound of a tokenizer, None if there is none or it is not known."""
    added, model = backend.get_added_tokens_decoder().values(), backend.model
    if backend.truncation is not None or not isinstance(model, models.BPE):
        return None
    if any(token.lstrip or token.rstrip for token in added):  # such a token covers all spaces beside it
        return None
    cuts, normalizing = _steps(backend.pre_tokenizer), _steps(backend.normalizer)
    if not all(step["type"] in _KEEP_ALL or _splits(step) for step in cuts):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    contents = [token.content for token in added]
    if backend.normalizer is not None:  # the content of added tokens may be normalized as well
        contents += [backend.normalizer.normalize_str(content) for content in contents]
    longest = max(*map(len, vocabulary), *(len(each.encode()) for each in contents), 1)
    if any(step["type"] == "ByteLevel" for step in cuts):
        dropped = bytes(byte for char, byte in BYTE_OF.items() if char not in vocabulary)
        nfc = normalizing == [_NFC] and not dropped
        return Fewest(longest, in_bytes=True, dropped=dropped, nfc=nfc) if nfc or not normalizing else None
    has_bytes = model.byte_fallback and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    if not has_bytes or not all(map(_lengthens, normalizing)):  # without bytes, unknown text of any length is one token
        return None
    return Fewest(longest, in_bytes=False)


def _steps(component: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a normalizer, a pre-tokenizer or None
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = state.get("pretokenizers", state.get("normalizers", [state]))
    return steps


def _splits(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Split" and step["behavior"] != "Removed")


def _lengthens(step: dict[str, Any]) -> bool:
    """Return whether a normalizer makes no text shorter, in characters."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and 0 < len(pattern) <= len(step["content"])
    return bool(step["type"] == "Prepend")
