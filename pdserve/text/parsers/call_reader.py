"""Reads one tool call, a JSON object with a name and arguments, as it comes."""

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON text of its arguments."""

    text: str


class CallReader:
    """One object. Its arguments are given out piece by piece once its name is known."""

    def __init__(self, argument_keys: Collection[str], name: str | None = None) -> None:
        """With `name`, the object is the arguments of the tool of that name."""
        self.raw = ""  # all that has come, until something was given out
        self.is_done = False
        self._argument_keys = argument_keys
        self._name = name
        self._is_arguments = name is not None
        self._was_begun = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._member = ""  # the text of a key or a value of the object
        self._pending = ""  # arguments not yet given out
        self._is_string: bool | None = None  # what the arguments are; None: none have come

    def push(self, text: str) -> tuple[list[CallBegun | Arguments], str]:
        """Take text that begins, or goes on, with the object; return what is known by it, and what follows its end."""
        for place, char in enumerate(text):
            if not self._was_begun:
                self.raw += char
            self._take(char)
            if self.is_done:
                return self._news(), text[place + 1 :]
        return self._news(), ""

    def _take(self, char: str) -> None:
        depth, was_in_string = self._depth, self._in_string
        self._follow(char)
        if self._is_arguments:
            self._take_argument(char)
            self.is_done = self._depth == 0
        elif self._depth == 0 or (depth == 1 and char == "," and not was_in_string):
            self._end_member()
            self.is_done = self._depth == 0
        elif depth == 1 and char == ":" and not was_in_string and self._key is None:
            self._end_key()
        elif depth > 0:
            self._member += char
            if self._key in self._argument_keys:
                self._take_argument(char)

    def _follow(self, char: str) -> None:
        """Keep account of strings and brackets."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _take_argument(self, char: str) -> None:
        if self._is_string is None and not char.isspace():
            self._is_string = char == '"'
        if self._is_string is not None:
            self._pending += char

    def _end_key(self) -> None:
        self._key = _string(self._member) or ""
        self._member = ""

    def _end_member(self) -> None:
        if self._key == "name":
            self._name = _string(self._member) or self._name
        elif self._is_string:
            text = _string(self._pending)  # a model may write its arguments as a string
            self._pending, self._is_string = self._pending if text is None else text, False
        self._key, self._member = None, ""

    def _news(self) -> list[CallBegun | Arguments]:
        if self._name is None:
            return []
        news: list[CallBegun | Arguments] = []
        if not self._was_begun:
            self._was_begun, self.raw = True, ""
            news.append(CallBegun(self._name))
        if self._pending and not self._is_string:
            news.append(Arguments(self._pending))
            self._pending = ""
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
