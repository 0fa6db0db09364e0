"""Separates a model's reasoning, which stands between <think> and </think>, from the rest of its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Literal, TypeVar

from pdserve.protocol.refusal import RefusedError
from pdserve.text.chat import ChatMessage, ChatOptions, ChatTemplate

Each = TypeVar("Each")


def split_at(text: str, marker: str) -> tuple[str, str, bool]:
    """Return the text before a marker, the text after it, and whether the marker is there.

    If it is not, the second part is the longest end of the text that could still become the marker.
    """
    before, found, after = text.partition(marker)
    if found:
        return before, after, True
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return text[:-length], text[-length:], False
    return text, "", False


BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    text: str
    is_reasoning: bool


class Reasoning:
    """Whether a model writes <think> itself, or its chat template has written it already."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._begins_inside = self._renders_open({})

    def begins_inside(self, template_kwargs: Mapping[str, object]) -> bool:
        """Return whether a conversation's prompt ends with <think>."""
        switches = {name: value for name, value in template_kwargs.items() if isinstance(value, bool)}
        return self._renders_open(switches) if switches else self._begins_inside

    def _renders_open(self, template_kwargs: Mapping[str, object]) -> bool:
        try:
            prompt = self._template.render([ChatMessage("user", "?")], ChatOptions(template_kwargs=template_kwargs))
        except RefusedError:
            return False
        return prompt.rstrip().endswith(BEGIN)


def reasoning_of(parser: Literal["auto", "think", "none"], template: ChatTemplate) -> Reasoning | None:
    """Return how a model reasons; None if its answers hold no reasoning: with auto, its template does not name any."""
    return Reasoning(template) if parser == "think" or (parser == "auto" and END in template.source) else None


class _Place(Enum):
    BEFORE = auto()  # nothing but spaces has come
    INSIDE = auto()
    AFTER = auto()


class ReasoningParser:
    """Reads one answer. Only its beginning can be reasoning; spaces around the reasoning are left out."""

    def __init__(self, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt ends with <think>."""
        self._place = _Place.INSIDE if begins_inside else _Place.BEFORE
        self._held = ""
        self._is_fresh = True  # nothing has come since the last marker

    @property
    def is_undecided(self) -> bool:
        """Whether the answer may still begin with reasoning."""
        return self._place is _Place.BEFORE

    @property
    def is_inside(self) -> bool:
        return self._place is _Place.INSIDE

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return the parts whose kind is known."""
        self._held += text
        parts: list[Part] = []
        if self._place is _Place.BEFORE:
            self._begin()
        if self._place is _Place.INSIDE:
            before, self._held, has_ended = split_at(self._held, END)
            parts += self._part(before, is_reasoning=True)
            if has_ended:
                self._place, self._is_fresh = _Place.AFTER, True
        if self._place is _Place.AFTER:
            held, self._held = self._held, ""
            parts += self._part(held, is_reasoning=False)
        return parts

    def finish(self) -> list[Part]:
        """End the answer; return what was held back."""
        held, self._held = self._held, ""
        return [Part(held, self._place is _Place.INSIDE)] if held else []

    def _begin(self) -> None:
        """Decide whether the answer begins with reasoning, once enough has come."""
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._place, self._held = _Place.INSIDE, text.removeprefix(BEGIN)
        elif text and not BEGIN.startswith(text):
            self._place, self._is_fresh = _Place.AFTER, False

    def _part(self, text: str, *, is_reasoning: bool) -> list[Part]:
        if self._is_fresh:
            text = text.lstrip()
        self._is_fresh &= not text
        return [Part(text, is_reasoning)] if text else []


class ReasoningTokens(Generic[Each]):
    """Counts the tokens of one answer's reasoning, its markers among them."""

    def __init__(self, piece: Callable[[int], bytes], *, begins_inside: bool) -> None:
        """`piece` returns a token's text. `begins_inside`: the prompt ends with <think>."""
        self.count = 0
        self._piece = piece
        self._parser = ReasoningParser(begins_inside=begins_inside)
        self._num_undecided = 0  # tokens
        self._held: list[Each] = []  # what belongs to these

    def push(self, token_ids: Sequence[int], beside: Sequence[Each]) -> list[Each]:
        """Take the next tokens, and what belongs to each of them, or nothing; return what is not of reasoning."""
        for place, token_id in enumerate(token_ids):
            was_inside = self._parser.is_inside
            if not (was_inside or self._parser.is_undecided):
                return list(beside[place:])
            self._parser.push(self._piece(token_id).decode(errors="replace"))
            if self._parser.is_undecided:
                self._num_undecided += 1
                self._held += beside[place : place + 1]
            elif was_inside or self._parser.is_inside:
                self.count += 1 + self._num_undecided
                self._num_undecided, self._held = 0, []
            else:
                held, self._held = self._held, []
                return [*held, *beside[place:]]
        return []
