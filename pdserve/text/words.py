"""Encodes a text word by word and remembers the words: most of a prompt has come before, in it or in another.

Invariant: the ids are those of the whole text. It is cut before a space and an ASCII letter, after a visible ASCII
character. There the patterns known here cut as well: none of them matches a visible character and then a space, a
match begins at the space, and nothing looks back. Merges do not go beyond such a cut, nor does any added token.
"""

import json
import re
from typing import Any

import tokenizers
from tokenizers import models

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
    """Return whether a tokenizer is one of those whose texts can be encoded word by word."""
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
    """The words of one tokenizer that may cut. Threads may share it."""

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
