"""Ending a text at a stop string, wherever the borders between its pieces fall.

Invariant: what is given out is the text up to the first stop string, whatever the pieces; and what is held
back is exactly the longest end of the text that could still become a stop string. Of several stop strings
the one that ends first counts, and of those ending together the longest. A stop string that ends where the text may
not end yet does not count.

The search is Aho and Corasick's (1975): one table look-up per character, for any number of stop strings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdserve.errors import invalid
from pdserve.text.detokenize import Detokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 128


def check_stops(stops: Sequence[str]) -> None:
    """Raise RequestError(INVALID_ARGUMENT) for too many stop strings, or one too long or empty."""
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid("stop", f"{len(stops)} stop strings are over the limit of {MAX_STOP_STRINGS}")
    for position, stop in enumerate(stops):
        num_bytes = len(stop.encode(errors="surrogatepass"))
        if not 1 <= num_bytes <= MAX_STOP_BYTES:
            raise invalid("stop", f"{num_bytes} bytes at position {position} are outside [1, {MAX_STOP_BYTES}]")


@dataclass(frozen=True, slots=True)
class _Automaton:
    """State s stands for the longest end of the text that begins a stop string; 0 for none."""

    children: tuple[dict[str, int], ...]
    fallback: tuple[int, ...]  # the state of the next shorter such end
    depth: tuple[int, ...]  # that end's length
    match: tuple[str | None, ...]  # the longest stop string the text ends with here


@lru_cache(maxsize=256)
def _compile(stops: tuple[str, ...]) -> _Automaton:
    children: list[dict[str, int]] = [{}]
    depth = [0]
    match: list[str | None] = [None]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in children[state]:
                children[state][char] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                match.append(None)
            state = children[state][char]
        match[state] = stop
    return _Automaton(tuple(children), _link(children, match), tuple(depth), tuple(match))


def _link(children: Sequence[dict[str, int]], match: list[str | None]) -> tuple[int, ...]:
    """Return each state's fallback, shortest states first, and let `match` see through them."""
    fallback = [0] * len(children)
    queue = list(children[0].values())
    for state in queue:
        for char, child in children[state].items():
            other = fallback[state]
            while other and char not in children[other]:
                other = fallback[other]
            fallback[child] = children[other].get(char, 0)
            queue.append(child)
        match[state] = match[state] or match[fallback[state]]
    return tuple(fallback)


class StopMatcher:
    """One sequence's text on its way to the client."""

    __slots__ = ("_automaton", "_held", "_state", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` have passed check_stops; the searching of equal tuples is prepared once."""
        self._automaton = _compile(stops) if stops else None
        self._held = ""
        self._state = 0
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take the next piece; return what may be given out now. After a match, nothing more may.

        may_end: whether a stop string that ends in this piece ends the text.
        """
        if self._automaton is None:
            return text
        if self.matched is not None:
            return ""
        end = self._advance(text, self._automaton, may_end)
        known = self._held + text[:end]
        keep = len(self.matched) if self.matched is not None else self._automaton.depth[self._state]
        cut = len(known) - keep
        self._held = "" if self.matched is not None else known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, text: str, automaton: _Automaton, may_end: bool) -> int:
        """Step over `text` until its end or a match; return how many characters that took."""
        children, fallback, match = automaton.children, automaton.fallback, automaton.match
        state = self._state
        for index, char in enumerate(text):
            while state and char not in children[state]:
                state = fallback[state]
            state = children[state].get(char, 0)
            if match[state] is not None:
                if may_end:
                    self.matched = match[state]
                    return index + 1
                while state and not children[state]:
                    state = fallback[state]  # nothing longer begins with it
        self._state = state
        return len(text)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens add to the answer."""

    text: str
    num_tokens: int  # how many of them the answer has; fewer than given where a stop string ended it
    stop: str | None  # the stop string that ended the text, or None while it goes on


class OutputText:
    """Text of one sequence. After a stop string or `finish`, it takes no more."""

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        """No stop string ends the text within its first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stops = StopMatcher(stops)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take a step's tokens; the one that completes a stop string is the last that counts."""
        if len(token_ids) == 1:
            return TextDelta(self._push_token(token_ids), 1, self._stops.matched)
        texts = []
        for position in range(len(token_ids)):
            texts.append(self._push_token(token_ids[position : position + 1]))
            if self._stops.matched is not None:
                return TextDelta("".join(texts), position + 1, self._stops.matched)
        return TextDelta("".join(texts), len(token_ids), None)

    def finish(self) -> TextDelta:
        """End the sequence without a stop string; return what was held back."""
        text = self._stops.push(self._detokenizer.flush(), may_end=self._num_tokens > self._min_tokens)
        return TextDelta(text + self._stops.flush(), 0, self._stops.matched)

    def _push_token(self, token_id: Sequence[int]) -> str:
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        return self._stops.push(text, may_end=self._num_tokens > self._min_tokens)
