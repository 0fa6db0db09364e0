"""Reads one tool call, a JSON object with a name and arguments, as it comes."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

_STRUCTURE = re.compile(r'["{}\[\],:]')
_IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON text of its arguments."""

    text: str


class CallReader:
    """One object. Its arguments are given out piece by piece once its name is known.

    Each character is looked at once, and kept in pieces that are joined once.
    """

    def __init__(self, argument_keys: Collection[str], name: str | None = None) -> None:
        """With `name`, the object is the arguments of the tool of that name."""
        self.is_done = False
        self._raw: list[str] = []  # all that has come, until something was given out
        self._argument_keys = argument_keys
        self._name = name
        self._is_arguments = name is not None
        self._was_begun = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._member: list[str] = []  # the text of a key, or of the name
        self._pending: list[str] = []  # arguments not yet given out
        self._is_string: bool | None = None  # what the arguments are; None: none have come

    @property
    def raw(self) -> str:
        """What has come, as long as nothing was given out."""
        return "".join(self._raw)

    def push(self, text: str) -> tuple[list[CallBegun | Arguments], str]:
        """Take text that begins, or goes on, with the object; return what is known by it, and what follows its end."""
        place = 0
        while place < len(text) and not self.is_done:
            place = self._take(text, place)
        if not self._was_begun:
            self._raw.append(text[:place])
        return self._news(), text[place:]

    def _take(self, text: str, place: int) -> int:
        """Take plain text and the quote, bracket, comma or colon behind it; return the place after that."""
        if self._is_escaped:
            self._is_escaped = False
            self._keep(text[place])
            return place + 1
        found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, place)
        if found is None:
            self._keep(text[place:])
            return len(text)
        if place < found.start():
            self._keep(text[place : found.start()])
        self._follow(found[0])
        return found.end()

    def _follow(self, char: str) -> None:
        """Take a character that begins or ends something."""
        depth, was_in_string = self._depth, self._in_string
        if was_in_string:
            self._in_string, self._is_escaped = char != '"', char == "\\"
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._is_arguments:
            self._keep(char)
        elif self._depth == 0 or (depth == 1 and char == "," and not was_in_string):
            self._end_member()
        elif depth == 1 and char == ":" and not was_in_string and self._key is None:
            self._end_key()
        elif depth > 0:
            self._keep(char)
        self.is_done = self._depth == 0

    def _keep(self, text: str) -> None:
        """Keep a piece of what is being read."""
        if self._is_arguments or self._key in self._argument_keys:
            if self._is_string is None:
                text = text.lstrip()
                self._is_string = text[0] == '"' if text else None
            self._pending.append(text)
        elif self._key is None or self._key == "name":
            self._member.append(text)

    def _end_key(self) -> None:
        self._key = _string("".join(self._member)) or ""
        self._member = []

    def _end_member(self) -> None:
        if self._key == "name":
            self._name = _string("".join(self._member)) or self._name
        elif self._is_string:
            written = "".join(self._pending)
            text = _string(written)  # a model may write its arguments as a string
            self._pending, self._is_string = [written if text is None else text], False
        self._key, self._member = None, []

    def _news(self) -> list[CallBegun | Arguments]:
        if self._name is None:
            return []
        news: list[CallBegun | Arguments] = []
        if not self._was_begun:
            self._was_begun, self._raw = True, []
            news.append(CallBegun(self._name))
        if not self._is_string and (pending := "".join(self._pending)):
            news.append(Arguments(pending))
            self._pending = []
        elif self.is_done and self._is_string is None:
            news.append(Arguments("{}"))
        return news


def _string(text: str) -> str | None:
    """Return the string that a JSON text is; None where it is something else, or half a character that nobody can send.

    Nothing else is parsed: clients can make a model nest what it writes as deeply as they like.
    """
    if not text.lstrip().startswith('"'):
        return None
    with suppress(ValueError):
        string: str = json.loads(text)
        string.encode()
        return string
    return None
