"""Guesses of what one sequence will sample, and how often they are right. Pure.

The guesses are what followed the latest tokens where they stood in the same sequence before. Source: prompt lookup
decoding (Saxena 2023). Earlier places are found as LZ77 coders find them: by the last tokens, and from each place to
the one before it. The longest match of a few counts, of equal ones the latest.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pdserve.base.values import value
from pdserve.protocol.drafts import DraftSource

_MOST_PLACES = 8  # that one lookup compares
_KEPT = 1 - 1 / 32  # weight of what is known of guesses, for each one verified after it
_WEIGHT = 2.0  # what is expected of a sequence's guesses counts as so many that were seen


@value
class AnswerLookup:
    """How guesses are found in recent answers, by vLLM's settings of suffix decoding."""

    longest: int  # tokens compared
    most_answers: int  # that are kept
    least_share: float  # of the places that went on as guessed, multiplied over guesses
    factor: float  # guesses for each token that matched


@value
class NgramLookup:
    """How many of the latest tokens have to have stood together before, and how many are compared."""

    shortest: int
    longest: int
    answers: AnswerLookup | None = None  # how guesses are found in other answers, too

    @property
    def source(self) -> DraftSource:
        return DraftSource.NGRAM if self.answers is None else DraftSource.SUFFIX


@value
class DraftsBy:
    """The runner makes guesses, with a draft model or a head."""

    source: DraftSource
    max_model_len: int  # tokens of the longest sequence that is guessed for

    @property
    def keeps_up(self) -> bool:
        """Whether steps compute what guesses need, also without drafting, as they do for a head."""
        return self.source is not DraftSource.DRAFT_MODEL


Guesser = NgramLookup | DraftsBy


@value
class Match:
    guesses: tuple[int, ...]
    num_matched: int  # tokens before them, at most `NgramLookup.longest`


NO_MATCH = Match((), 0)


class NgramIndex:
    """The places of n-grams in one sequence, whose tokens only ever grow. Takes about 100 bytes a token."""

    def __init__(self, lookup: NgramLookup) -> None:
        self._lookup = lookup
        self._latest: dict[tuple[int, ...], int] = {}  # the position behind an n-gram, the latest one
        self._earlier = array("i")  # by position: the one before it behind the same n-gram; 0: none
        self.num_indexed = 0  # positions; the n-gram in front of the last token's end is left to the lookup

    def extend(self, tokens: Seq[int], most: int) -> int:
        """Index at most so many more positions, all but the last one; return how many that were."""
        start, size = self.num_indexed, self._lookup.shortest
        stop = max(start, min(len(tokens), start + most))
        latest, earlier = self._latest, self._earlier
        for end in range(start, stop):
            ngram = tuple(tokens[end - size : end]) if end >= size else ()
            earlier.append(latest.get(ngram, 0) if ngram else 0)
            if ngram:
                latest[ngram] = end
        self.num_indexed = stop
        return stop - start

    def find(self, tokens: Seq[int], most: int) -> Match:
        """Return at most so many guesses of what follows the tokens, all of whose positions are indexed."""
        size, end = self._lookup.shortest, len(tokens)
        place = self._latest.get(tuple(tokens[end - size :]), 0) if end >= size else 0
        best, num_best = 0, 0
        for _ in range(_MOST_PLACES):
            if not place:
                break
            matched = self._num_matched(tokens, place)
            if matched > num_best:
                best, num_best = place, matched
            if matched == self._lookup.longest:
                break
            place = self._earlier[place]
        if not best:
            return NO_MATCH
        guesses = list(tokens[best : best + most])
        while len(guesses) < most:  # the match runs into the end: what repeats goes on repeating
            guesses.append(guesses[len(guesses) - (end - best)])
        return Match(tuple(guesses), num_best)

    def _num_matched(self, tokens: Seq[int], place: int) -> int:
        """Return how many tokens before a place equal the last ones."""
        end, count = len(tokens), self._lookup.shortest
        while count < min(self._lookup.longest, place) and tokens[place - 1 - count] == tokens[end - 1 - count]:
            count += 1
        return count


@dataclass(slots=True)
class Trials:
    """How many guesses were verified lately, and how many of them were right."""

    num_tried: float = 0.0
    num_right: float = 0.0

    def share(self, expected: float) -> float:
        return (self.num_right + _WEIGHT * expected) / (self.num_tried + _WEIGHT)

    def note(self, num_right: int, *, ended_wrong: bool) -> None:
        """Count guesses that were right, and the wrong one behind them, if there is one."""
        num_tried = num_right + ended_wrong
        self.fade(_KEPT**num_tried)
        self.num_tried += num_tried
        self.num_right += num_right

    def fade(self, kept: float) -> None:
        self.num_tried *= kept
        self.num_right *= kept


@dataclass(slots=True)
class Guessing:
    """What is known of one sequence's guesses."""

    index: NgramIndex | None = None  # from the first lookup on
    trials: Trials = field(default_factory=Trials)
    num_matched: int = 0  # tokens before the present guesses
    source: DraftSource | None = None  # of the present guesses; None: the runner makes them
    num_drafted: int = 0  # leading tokens whose KV the draft model has
    num_to_feed: int = 0  # most tokens before those of the next step that the draft model takes in after it
    num_to_draft: int = 0  # most guesses that the draft model makes after the next step
