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
