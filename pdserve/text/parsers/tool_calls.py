"""How families of models write tool calls, and how those are read from an answer as it comes.

An answer is content until a call begins. What stands between calls, and what follows the last one, is left out.
"""

from dataclasses import dataclass
from typing import Literal

from pdserve.text.parsers.call_reader import Arguments, CallBegun, CallReader
from pdserve.text.parsers.reasoning import split_at

FormatName = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: `begin`, objects with a name and arguments, `end`."""

    name: FormatName
    begin: str
    end: str
    arguments_key: str
    may_be_bare: bool = False  # an answer that begins with an object is a call, without `begin`
    is_list: bool = False  # the objects after `begin` are items of a list
    takes_several: bool = True


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments"),
    "llama3_json": ToolFormat("llama3_json", "<|python_tag|>", "", "parameters", may_be_bare=True, takes_several=False),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", is_list=True),
}
MAX_HELD = 1024  # characters: of spaces before an answer, and of what stands between calls, a name for instance
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})  # whichever is written is meant


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


Event = Content | CallBegun | Arguments


class ToolCallParser:
    """One answer."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._held = ""
        self._reader: CallReader | None = None
        self._is_among_calls = False
        self._is_at_start = True  # nothing but spaces has come

    def push(self, text: str) -> list[Event]:
        """Take the next piece; return what is known by it."""
        self._held += text
        events: list[Event] = []
        before = None
        while before != (before := (self._held, self._reader, self._is_among_calls)):
            events += self._step()
        return events

    def finish(self) -> list[Event]:
        """End the answer; return what was held back, and what began like a call and is none."""
        held = self._reader.raw if self._reader is not None else "" if self._is_among_calls else self._held
        self._held, self._reader = "", None
        return [Content(held)] if held else []

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
            self._held, self._reader, self._is_at_start = text, CallReader(_ARGUMENT_KEYS), False
            return []
        before, rest, is_there = split_at(self._held, self._format.begin)
        if self._is_at_start and not before.strip() and len(before) < MAX_HELD:
            if not is_there:
                return []
            before = ""
        self._held, self._is_among_calls, self._is_at_start = rest, is_there, False
        return [Content(before)] if before else []

    def _look_for_call(self) -> None:
        """Begin with the next call, or leave the calls."""
        before, brace, _ = self._held.partition("{")
        if self._format.end and self._format.end in before:
            self._held, self._is_among_calls = self._held.partition(self._format.end)[2], False
        elif brace:
            self._held = self._held[len(before) :]
            self._reader = CallReader(_ARGUMENT_KEYS, self._name_in(before[-MAX_HELD:]) or None)
        else:
            self._held = before[-MAX_HELD:]

    def _name_in(self, before: str) -> str:
        """Return the name that stands before the arguments, as later models of Mistral write it, if it does."""
        if not self._format.is_list:
            return ""
        return before.replace(self._format.begin, "").partition("[")[0].strip(" \n,;]")

    def _read(self, reader: CallReader) -> list[Event]:
        news, self._held = reader.push(self._held)
        if not reader.is_done:
            return [*news]
        self._reader = None
        self._is_among_calls |= not reader.raw
        return [Content(reader.raw)] if reader.raw else [*news]
