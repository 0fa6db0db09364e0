"""How families of models write tool calls, and how those are read from an answer as it comes.

An answer is content until a call begins. What stands between calls, and what follows the last one, is left out, and so
are the spaces before and after calls.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pdserve.text.reasoning import split_at

FormatName = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: `begin`, objects with a name and arguments, `end`."""

    name: FormatName
    begin: str
    end: str
    arguments_key: str
    may_be_bare: bool = False  # an answer that begins with an object which names a tool is a call, without `begin`
    is_list: bool = False  # the objects after `begin` are items of a list
    takes_several: bool = True


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments"),
    "llama3_json": ToolFormat("llama3_json", "<|python_tag|>", "", "parameters", may_be_bare=True, takes_several=False),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", is_list=True),
}
MAX_HELD = 1024  # characters: of spaces before an answer, and of what stands between calls, a name for instance
_ARGUMENT_KEYS = ("arguments", "parameters")  # models of any format may write either
_STRUCTURE = re.compile(r'["{}\[\],:]')
_IN_STRING = re.compile(r'["\\]')


def format_of(template: str) -> ToolFormat:
    """Return how a model writes calls, by what its chat template teaches it; as Hermes does where it says nothing."""
    for name in ("hermes", "mistral", "llama3_json"):
        if FORMATS[name].begin in template:
            return FORMATS[name]
    return FORMATS["llama3_json"] if '"parameters":' in template else FORMATS["hermes"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the JSON text of its arguments."""

    text: str


Event = Content | CallBegun | Arguments


class _CallReader:
    """Reads one call, a JSON object. Its arguments are given out piece by piece once its name is known.

    Each character is looked at once, and kept in pieces that are joined once.
    """

    def __init__(self, name: str | None = None, names: frozenset[str] | None = None) -> None:
        """With `name`, the object is the arguments of the tool of that name. `names`: all that a call may have."""
        self._names = names
        self.is_done = False
        self._raw: list[str] = []  # all that has come, until something was given out
        self._name = name
        self._is_arguments = name is not None
        self._was_begun = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._member: list[str] = []  # the text of a key, or of the name
        self._pending: list[str] = []  # arguments not yet given out
        self._is_held: bool | None = None  # arguments are not given out before they end; None: none have come

    @property
    def raw(self) -> str:
        """What has come, as long as nothing was given out."""
        return "".join(self._raw)

    def push(self, text: str) -> tuple[list[CallBegun | Arguments], str]:
        """Take the next text of the object; return the events that it completes, and what follows the object."""
        place = 0
        while place < len(text) and not self.is_done:
            place = self._take(text, place)
        if not self._was_begun:
            self._raw.append(text[:place])
        return self._events(), text[place:]

    def _take(self, text: str, place: int) -> int:
        """Take the text up to and with the next quote, bracket, comma or colon; return the place after it."""
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
        if self._is_arguments or self._key in _ARGUMENT_KEYS:
            if self._is_held is None:
                text = text.lstrip()
                self._is_held = text[0] in '"n' if text else None
            self._pending.append(text)
        elif self._key is None or self._key == "name":
            self._member.append(text)

    def _end_key(self) -> None:
        self._key = _string("".join(self._member)) or ""
        self._member = []

    def _end_member(self) -> None:
        if self._key == "name":
            self._name = _string("".join(self._member)) or self._name
        elif self._is_held:
            written = "".join(self._pending)
            text = _string(written)  # a model may write its arguments as a string, or null where there are none
            text = written if text is None else text
            self._pending, self._is_held = ["{}" if text.strip() in ("", "null") else text], False
        self._key, self._member = None, []

    def _events(self) -> list[CallBegun | Arguments]:
        if self._name is None or (self._names is not None and self._name not in self._names):
            return []
        events: list[CallBegun | Arguments] = []
        if not self._was_begun:
            self._was_begun, self._raw = True, []
            events.append(CallBegun(self._name))
        if not self._is_held:
            events += self.rest()
        if self.is_done and self._is_held is None:
            events.append(Arguments("{}"))
        return events

    def rest(self) -> list[CallBegun | Arguments]:
        """Give out arguments that are held back, where the call has begun."""
        pending, self._pending = "".join(self._pending), []
        return [Arguments(pending)] if pending and self._was_begun else []


def _string(text: str) -> str | None:
    """Return the string that a JSON text spells; None if it is no string, or holds half of a surrogate pair.

    Other JSON is not parsed: clients can make a model nest what it writes as deeply as they like.
    """
    if not text.lstrip().startswith('"'):
        return None
    with suppress(ValueError):
        string: str = json.loads(text)
        string.encode()
        return string
    return None


class ToolCallParser:
    """Reads one answer."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str] | None = None) -> None:
        """`names`: of the tools, which tell a call that nothing announces from other JSON; None: any name does."""
        self._format = tool_format
        self._names = names
        self._held = ""
        self._reader: _CallReader | None = None
        self._is_among_calls = False
        self._is_at_start = True  # nothing but spaces has come
        self._is_blank = True  # nothing but spaces has come since the start, or since the last call
        self._has_calls = False
        self._awaits_call = False  # a call was announced, and has not ended

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._awaits_call or self._reader is not None

    def push(self, text: str) -> list[Event]:
        """Take the next piece; return the events that it completes."""
        self._held += text
        events: list[Event] = []
        before = None
        while before != (before := (self._held, self._reader, self._is_among_calls)):
            events += self._step()
        return events

    def finish(self) -> list[Event]:
        """End the answer; return what was held back, which may have begun like a call."""
        reader, held = self._reader, self._held
        self._held, self._reader = "", None
        if reader is not None:
            return [Content(reader.raw)] if reader.raw else [*reader.rest()]
        is_left_out = self._is_among_calls or (self._has_calls and not held.strip())
        return [Content(held)] if held and not is_left_out else []

    def _step(self) -> list[Event]:
        if self._reader is not None:
            return self._read(self._reader)
        if self._is_among_calls:
            self._look_for_call()
            return []
        return self._look_for_begin()

    def _look_for_begin(self) -> list[Event]:
        text = self._held.lstrip()
        if self._is_at_start and self._format.may_be_bare and text.startswith("{"):
            self._held, self._reader, self._is_at_start = text, _CallReader(names=self._names), False
            return []
        before, rest, is_there = split_at(self._held, self._format.begin)
        if self._is_blank and not before.strip() and len(before) < MAX_HELD:
            if not is_there:
                return []
            before = ""
        self._held, self._is_among_calls = rest, is_there
        self._is_at_start = self._is_blank = False
        self._awaits_call = is_there
        return [Content(before)] if before else []

    def _look_for_call(self) -> None:
        """Begin with the next call, or leave the calls."""
        before, brace, _ = self._held.partition("{")
        if self._format.end and self._format.end in before:
            self._held, self._is_among_calls = self._held.partition(self._format.end)[2], False
            self._is_blank, self._awaits_call = True, False
        elif brace:
            self._held = self._held[len(before) :]
            self._reader = _CallReader(self._name_in(before[-MAX_HELD:]) or None)
        else:
            self._held = before[-MAX_HELD:]

    def _name_in(self, before: str) -> str:
        """Return the name that stands before the arguments, as later models of Mistral write it, if it does."""
        if not self._format.is_list:
            return ""
        return before.replace(self._format.begin, "").partition("[")[0].strip(" \n,;]")

    def _read(self, reader: _CallReader) -> list[Event]:
        events, self._held = reader.push(self._held)
        if not reader.is_done:
            return [*events]
        self._reader, self._awaits_call = None, False
        self._has_calls |= not reader.raw
        self._is_among_calls |= not reader.raw
        return [Content(reader.raw)] if reader.raw else [*events]
