"""Special tokens that the texts of a chat spell, such as the end of a turn, and how they stay text.

Invariant: each special token of a prompt was written by the template. No client can add one.

Before a template is rendered, the first character of each text that spells a special token is replaced by a stand-in: a
character that nothing else in the request holds. A text that ends with the beginning of a special token gets one, too,
as the next text could go on with it. What still spells a special token in the rendered prompt is the template's. It is
given an alias, which nobody can guess. Then each stand-in is replaced by its character, and a second tokenizer encodes
the prompt. It shares the vocabulary, has a token for each alias, and knows no special token.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import groupby
from os.path import commonprefix

import tokenizers

from pdserve.protocol.refusal import RefusedError, invalid

# All of these are of Unicode's private use. No alias has a character that may be a stand-in.
_STAND_INS = range(0xE100, 0xF8FF)
_NONCE_CHARS, _NONCE_LENGTH = range(0x100000, 0x10FFFD), 10  # 160 bits
_FIRST_ALIAS, _BREAK = 0xF0000, 0x10FFFD
_BETWEEN = "\0"  # texts that are searched together
_IN_JSON = re.compile(r"\\u([0-9A-Fa-f]{4})")

StandIns = Mapping[str, str]  # by the character that one stands for


class SpecialTexts:
    """How one tokenizer's special tokens are spelled. Immutable; threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Share the backend's model, normalizer and pre-tokenizer: no vocabulary is copied."""
        added = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.content}
        special = [token.content for token in added.values() if token.special]
        nonce = "".join(chr(secrets.choice(_NONCE_CHARS)) for _ in range(_NONCE_LENGTH))
        self._aliases = {text: nonce + chr(_FIRST_ALIAS + place) for place, text in enumerate(special)}
        self._break = nonce + chr(_BREAK)
        begun = {text[:end] for text in special for end in range(1, len(text)) if not text[:end].isspace()}
        self._spelled = _pattern(_either(special), f"{_either(begun)}\\s*+(?:\\Z|{_BETWEEN})" if begun else "")
        self._added = _pattern(_either(token.content for token in added.values()))
        is_normalized = any(token.special and token.normalized for token in added.values())
        self._normalizer = backend.normalizer if is_normalized else None
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._twin = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._twin.pre_tokenizer = backend.pre_tokenizer
        tokens = [self._of_twin(token) for token in added.values()]
        self._twin.add_tokens([*tokens, tokenizers.AddedToken(self._break, normalized=False)])  # each call is slow
        own_ids = self._twin.get_added_tokens_decoder()  # the break is one, and stands for none
        real_ids = {token.content: token_id for token, token_id in zip(tokens, added, strict=True)}
        self._real_ids = {own_id: real_ids.get(token.content) for own_id, token in own_ids.items()}

    def _of_twin(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        spaces = {"lstrip": token.lstrip, "rstrip": token.rstrip}
        if token.special:
            return tokenizers.AddedToken(self._aliases[token.content], normalized=False, **spaces)
        flags = {"normalized": token.normalized, "single_word": token.single_word}
        return tokenizers.AddedToken(token.content, **flags, **spaces)

    def are_in(self, value: object) -> bool:
        """Return whether a text within a JSON value spells a special token, or ends with the beginning of one."""
        text = _BETWEEN.join(_texts(value))
        if self._spelled.search(text) is not None:
            return True
        if self._normalizer is None:
            return False
        whole = text.encode(errors="replace").decode()  # without halves of surrogate pairs
        return self._spelled.search(self._normalizer.normalize_str(whole)) is not None

    def stand_ins(self, value: object, besides: str) -> StandIns:
        """Return stand-ins that are neither in the texts of a JSON value nor in `besides`; RefusedError if none is."""
        taken = "\n".join((*_texts(value), *self._aliases, besides))
        used = {ord(char) for char in set(taken)} | {int(code, 16) for code in _IN_JSON.findall(taken)}
        free = (chr(code) for code in _STAND_INS if code not in used)
        try:
            return {first: next(free) for first in sorted({_first(text) for text in self._aliases})}
        except StopIteration as error:
            raise invalid("chat", "its texts hold every character of Unicode's private use") from error

    def hidden(self, value: object, stand_ins: StandIns) -> object:
        """Return a JSON value with texts that spell no special token. RefusedError if it is nested too deeply."""
        try:
            return self._hidden(value, stand_ins)
        except RecursionError as error:
            raise invalid("chat", "it is nested too deeply") from error

    def _hidden(self, value: object, stand_ins: StandIns) -> object:
        match value:
            case str():
                return self._hidden_text(value, stand_ins)
            case Mapping():
                return {self._hidden_text(key, stand_ins): self._hidden(each, stand_ins) for key, each in value.items()}
            case list() | tuple():
                return [self._hidden(each, stand_ins) for each in value]
            case _:
                return value

    def _hidden_text(self, text: str, stand_ins: StandIns) -> str:
        def hide(match: re.Match[str]) -> str:
            first = _first(match[0])
            return match[0].replace(first, stand_ins[first], 1)

        num_found = 1
        while num_found:  # a special token may begin within another
            text, num_found = self._spelled.subn(hide, text)
        return text

    def encode(self, rendered: str, stand_ins: StandIns) -> list[int]:
        """Return the ids of a prompt that was rendered from hidden texts. RefusedError for text that is no Unicode."""
        named = self._added.sub(lambda match: self._aliases.get(match[0], match[0]), rendered)
        ids = self._encode(shown(named, stand_ins))
        if any(token_id in self._special_ids and token_id not in self._real_ids for token_id in ids):
            # The vocabulary has a special token as a word, too. With a break after its first letter it is none.
            ids = self._encode(shown(named, stand_ins, self._break))
        real = (self._real_ids.get(token_id, token_id) for token_id in ids)
        return [token_id for token_id in real if token_id is not None]

    def _encode(self, prompt: str) -> list[int]:
        try:
            (encoded,) = self._twin.encode_batch_fast([prompt], add_special_tokens=False)
        except TypeError as error:
            raise no_text() from error
        ids: list[int] = encoded.ids
        return ids


def no_text() -> RefusedError:
    """Return the error for a prompt that the tokenizers library does not take as text."""
    return invalid("prompt", "holds half of a surrogate pair, which is no character")


def _texts(value: object) -> list[str]:
    """Return all texts of a JSON value, keys too, in no order."""
    found: list[str] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, (dict, Mapping)):  # a dict is found in less time by its name
            found += each
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
    return found


def _either(texts: Iterable[str]) -> str:
    """Return a pattern of the longest of some texts; empty for none.

    What several begin with stands in it once, so that it is quick for thousands.
    """
    ordered = sorted(set(texts))
    parts = []
    for _, group in groupby((text for text in ordered if text), key=lambda text: text[0]):
        alike = list(group)
        shared = commonprefix(alike)  # noqa: RUF071 - these are no paths
        parts.append(re.escape(shared) + _either(text[len(shared) :] for text in alike))
    return f"(?:{'|'.join(parts)}){'?' if '' in ordered else ''}" if parts else ""


def _pattern(*choices: str) -> re.Pattern[str]:
    given = "|".join(filter(None, choices))
    return re.compile(given or r"(?!)")  # which matches nothing


def _first(text: str) -> str:
    """Return the character that is replaced: templates look at spaces around texts."""
    return text.lstrip()[:1] or text[0]


def _in_json(char: str) -> str:
    """Return a character as JSON in ASCII spells it: a template may write what it is given so."""
    return f"\\u{ord(char):04x}"


def shown(prompt: str, stand_ins: StandIns, after: str = "") -> str:
    """Return a prompt with each stand-in replaced by its character, and what is to follow that."""
    for first, stand_in in stand_ins.items():
        prompt = prompt.replace(stand_in, first + after).replace(_in_json(stand_in), first + after)
    return prompt
