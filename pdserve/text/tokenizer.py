"""One model's tokenizer, as the router and the command line use it.

Most words of a prompt have come before, in it or in another. So a text is encoded word by word where the tokenizer
allows it, and words are remembered. Invariant: the ids are those of the whole text. A text is cut before a space and an
ASCII letter, after a visible ASCII character. The patterns known here cut there as well: none of them matches a visible
character and then a space, a match begins at the space, and nothing looks back. No merge and no added token goes beyond
such a cut.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import models

from pdserve.text.detokenize import Detokenizer, read_pieces
from pdserve.text.fewest_tokens import fewest
from pdserve.text.special_texts import SpecialTexts, no_text

MAX_WORDS = 32_768  # about 10 MB
MAX_CHARS = 64  # of a word that is remembered
MAX_TEXT = 16_384  # characters that are cut: 0.4 ms with Python's lock, which encoding a whole text does not hold
_WORD = re.compile(r" ?[!-~]+(?= [A-Za-z])|.+?[!-~](?= [A-Za-z])|.+", re.DOTALL)  # the first is the quickest
_SPACE_INSIDE = re.compile("[!-~] ")
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS, QWEN2_WORDS = (
    "|".join((CONTRACTIONS, LETTERS, digits, SYMBOLS, SPACES)) for digits in (r"\p{N}{1,3}", r"\p{N}")
)
_PATTERNS = (GPT2_WORDS, LLAMA3_WORDS, QWEN2_WORDS)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_DIGITS = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}


def may_cut(backend: tokenizers.Tokenizer) -> bool:
    """Return whether texts can be encoded word by word with this tokenizer."""
    if backend.truncation is not None or backend.padding is not None or backend.pre_tokenizer is None:
        return False
    if not isinstance(backend.model, models.BPE) or backend.model.dropout is not None:
        return False
    if not backend.encode("a", add_special_tokens=False).ids:
        return False
    if backend.normalizer is not None and _state(backend.normalizer) != {"type": "NFC"}:
        return False
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word or _SPACE_INSIDE.search(token.content) for token in added):
        return False
    pre = _state(backend.pre_tokenizer)
    *cuts, last = [step for step in pre.get("pretokenizers", [pre]) if step != _DIGITS and step["type"] != "Digits"]
    if not last.items() >= _BYTES.items():
        return False
    if last["use_regex"]:  # GPT-2's
        return not cuts
    return any(cuts == [{**_DIGITS, "pattern": {"Regex": pattern}}] for pattern in _PATTERNS)


def _state(step: tokenizers.normalizers.Normalizer | tokenizers.pre_tokenizers.PreTokenizer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(step.__getstate__())
    return state


class Words:
    """Remembers the words of a tokenizer for which `may_cut` is true. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[str, list[int]] = {}
        bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        place = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        self._before, self._after = whole[:place], whole[place + len(bare) :]  # special tokens around a text

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of a text of up to MAX_TEXT characters. TypeError for one that is no Unicode."""
        words, known, ids = _WORD.findall(text), self._known, list[int]()
        try:
            for word in words:
                ids += known[word]
        except KeyError:
            ids = self._learn(words)
        return [*self._before, *ids, *self._after] if add_special else ids

    def _learn(self, words: list[str]) -> list[int]:
        """Return the ids of words, and remember the new ones."""
        known = self._known
        fresh = [word for word in dict.fromkeys(words) if word not in known]
        encoded = self._backend.encode_batch_fast(fresh, add_special_tokens=False)
        found = dict(zip(fresh, [each.ids for each in encoded], strict=True))
        ids = [i for word in words for i in (found[word] if word in found else known[word])]
        if len(known) + len(found) > MAX_WORDS:
            known = self._known = {}  # other threads finish with the one that they have
        known.update((word, each) for word, each in found.items() if len(word) <= MAX_CHARS)
        return ids


class Tokenizer:
    """Text to ids and ids to text. Immutable; threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None) -> None:
        self._backend = backend
        self._pieces = read_pieces(backend)
        self._words = Words(backend) if may_cut(backend) else None
        self._fewest = fewest(backend)
        self._adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.vocab_size = len(self._pieces.by_id)
        self.special_texts = SpecialTexts(backend)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of `text`; with `add_special`, also the ends the model expects, bos never twice.

        Takes about a second for a megabyte. RefusedError for text that is no Unicode.
        """
        try:
            ids = self._encode(text, add_special)
        except TypeError as error:
            raise no_text() from error
        if add_special and self._adds_bos and ids[1:2] == ids[:1]:
            return ids[1:]
        return ids

    def _encode(self, text: str, add_special: bool) -> list[int]:
        if self._words is not None and len(text) <= MAX_TEXT:
            return self._words.encode(text, add_special=add_special)
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)  # without offsets
        ids: list[int] = encoded.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, by its length; 0 where nothing is known."""
        return 0 if self._fewest is None else self._fewest.of(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all ids, special tokens left out."""
        detokenizer = self.detokenizer(at_start=True)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, at_start: bool, skip_special: bool = True) -> Detokenizer:
        """Start decoding a sequence; `at_start` is False if its text continues a prompt's."""
        return Detokenizer(self._pieces, at_start=at_start, skip_special=skip_special)

    def piece(self, token_id: int) -> bytes:
        """Return what a token adds to a text, special ones too; nothing for an id that no token has."""
        pieces = self._pieces.with_special
        piece = pieces[token_id] if 0 <= token_id < len(pieces) else b""
        return piece.encode() if isinstance(piece, str) else piece

    def has_tokens_of(self, other: "Tokenizer") -> bool:
        """Return whether each id is the same token."""
        return self._pieces.with_special == other._pieces.with_special

    def to_json(self) -> str:
        """Return the tokenizer as the tokenizers library writes it to a file."""
        text: str = self._backend.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found
