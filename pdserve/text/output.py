"""One sequence's tokens on their way to the client: detokenized, and ended at a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.text.detokenize import Detokenizer
from pdserve.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens add to the answer."""

    text: str
    num_tokens: int  # how many of them the answer has; fewer than given where a stop string ended it
    stop: str | None  # the stop string that ended the text, or None while it goes on


class OutputText:
    """Text of one sequence. After a stop string or `finish`, it takes no more."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take a step's tokens; the one that completes a stop string is the last that counts."""
        if len(token_ids) == 1:
            text = self._stops.push(self._detokenizer.push(token_ids))
            return TextDelta(text, 1, self._stops.matched)
        texts = []
        for position in range(len(token_ids)):
            texts.append(self._stops.push(self._detokenizer.push(token_ids[position : position + 1])))
            if self._stops.matched is not None:
                return TextDelta("".join(texts), position + 1, self._stops.matched)
        return TextDelta("".join(texts), len(token_ids), None)

    def finish(self) -> TextDelta:
        """End the sequence without a stop string; return what was held back."""
        text = self._stops.push(self._detokenizer.flush())
        return TextDelta(text + self._stops.flush(), 0, self._stops.matched)
