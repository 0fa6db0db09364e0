"""Ends a text at a stop string, wherever the text is cut into pieces.

Invariant: the text up to the first stop string is given out, whatever the pieces; and exactly the longest end of the
text that could still become a stop string is held back. Of several stop strings the one that ends first counts, and of
those that end together the longest. A stop string does not count if the text may not end where it ends.
"""

from collections.abc import Sequence
from functools import lru_cache

from pdserve.base.values import value
from pdserve.protocol.refusal import invalid
from pdserve.text.detokenize import Detokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 128


def check_stops(stops: Sequence[str]) -> None:
    """Raise RefusedError(INVALID_ARGUMENT) for too many stop strings, or one too long or empty."""
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid("stop", f"{len(stops)} stop strings are over the limit of {MAX_STOP_STRINGS}")
    for position, stop in enumerate(stops):
        num_bytes = len(stop.encode(errors="surrogatepass"))
        if not 1 <= num_bytes <= MAX_STOP_BYTES:
            raise invalid("stop", f"{num_bytes} bytes at position {position} are outside [1, {MAX_STOP_BYTES}]")


@lru_cache(maxsize=256)
def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    """Return every proper beginning of a stop string."""
    return frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))


class StopMatcher:
    """One sequence's text on its way to the client."""

    __slots__ = ("_beginnings", "_held", "_includes_stop", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, includes_stop: bool = False) -> None:
        """`stops` have passed check_stops. `includes_stop`: the one that ends the text stays in it."""
        self._includes_stop = includes_stop
        self._stops = stops
        self._beginnings = _beginnings(stops)
        self._longest = max(map(len, stops), default=1) - 1  # that may be held back
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take the next piece; return what may be given out now. After a match, nothing more may.

        may_end: whether a stop string that ends in this piece ends the text.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        known = self._held + text
        if may_end and (found := self._first_stop(known)) is not None:
            begin, self.matched = found
            self._held = ""
            return known[: begin + len(self.matched)] if self._includes_stop else known[:begin]
        lengths = range(min(self._longest, len(known)), 0, -1)
        cut = len(known) - next((length for length in lengths if known[-length:] in self._beginnings), 0)
        self._held = known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, known: str) -> tuple[int, str] | None:
        """Return where the first stop string that ends past the held text begins, and which one it is."""
        starts = ((known.find(stop, max(0, len(self._held) + 1 - len(stop))), stop) for stop in self._stops)
        found = [(start, stop) for start, stop in starts if start >= 0]
        return min(found, key=lambda each: (each[0] + len(each[1]), each[0]), default=None)


@value
class TextDelta:
    text: str
    num_tokens: int  # how many of them the answer has; fewer than given where a stop string ended it
    stop: str | None  # the stop string that ended the text, or None while it goes on


class OutputText:
    """Text of one sequence. It takes no tokens after a stop string or `finish`."""

    __slots__ = ("_detokenizer", "_has_stops", "_includes_stop", "_min_tokens", "_num_tokens", "_stops")

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int = 0, *, includes_stop: bool = False
    ) -> None:
        """No stop string ends the text within its first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._has_stops = bool(stops)
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stops = StopMatcher(stops, includes_stop=includes_stop)

    def push(self, token_ids: Sequence[int], *, ends_in_stop_token: bool = False) -> TextDelta:
        """Take a step's tokens; the one that completes a stop string is the last that counts.

        ends_in_stop_token: the last of them ended the sequence. It counts, and like a stop string is left out of the
        text.
        """
        num_shown = len(token_ids) - (ends_in_stop_token and not self._includes_stop)
        if not self._has_stops:
            return TextDelta(self._detokenizer.push(token_ids[:num_shown]), len(token_ids), None)
        texts = []
        for position in range(num_shown):
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
