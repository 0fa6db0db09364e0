"""The answers that a worker has given lately, and guesses of what follows in others. Pure.

Guesses are what most often followed the longest match with the latest tokens of a sequence, as in suffix decoding
(Oliaro et al. 2024), where trees of suffixes say so. Here places are found as in `guesses`: agents' answers repeat each
other in long runs, which a few places show as well. Answers are kept in a ring, so memory is bounded. Only requests
that may share KV see each other's answers: how fast an answer comes would tell of them.
"""

from array import array
from collections import Counter, deque
from collections.abc import Sequence as Seq

from pdserve.base.values import value
from pdserve.engine.guesses import NO_MATCH, AnswerLookup, Match
from pdserve.protocol.prefix_hash import CacheScope

CAPACITY = 2**18  # tokens of all answers: about 50 MB
MOST_OF_ONE = 2048  # tokens of an answer, its last ones: indexing them, and forgetting as many, takes 3 to 5 ms
MOST_WAITING = 64  # answers that are not indexed yet
SHORTEST = 2  # tokens that have to have stood together
_MOST_PLACES = 8  # that one lookup compares
_BORDER = -1  # before and behind each answer


@value
class _Answer:
    begin: int  # its first border
    end: int  # behind its last one
    scope: CacheScope


class RecentAnswers:
    """Answers in a ring, and for each scope the places of their n-grams. Positions only ever grow."""

    def __init__(self, lookup: AnswerLookup, capacity: int = CAPACITY) -> None:
        self._lookup = lookup
        self._tokens = array("i", bytes(4 * capacity))
        # By position: the one before it behind the same n-gram; 0: none.
        self._earlier = array("q", bytes(8 * capacity))
        self._answers: deque[_Answer] = deque()  # the oldest first
        self._latest: dict[CacheScope, dict[tuple[int, ...], int]] = {}  # the position behind an n-gram, the latest one
        self._waiting: deque[tuple[CacheScope, Seq[int]]] = deque(maxlen=MOST_WAITING)
        self._end = 1

    def remember(self, scope: CacheScope, tokens: Seq[int], num_prompt_tokens: int) -> None:
        """Keep an answer, with the last of the prompt's tokens, which come first, once it is indexed."""
        first = max(0, num_prompt_tokens - self._lookup.longest, len(tokens) - min(MOST_OF_ONE, len(self._tokens) - 2))
        if len(tokens) - first > SHORTEST and self._lookup.most_answers:
            self._waiting.append((scope, tokens[first:]))

    def index_one(self) -> None:
        """Index the answer that has waited the longest, and forget the oldest ones where there is no room."""
        if not self._waiting:
            return
        scope, kept = self._waiting.popleft()
        answer = _Answer(self._end, self._end + len(kept) + 2, scope)
        while self._answers and (
            answer.end - self._answers[0].begin > len(self._tokens) or len(self._answers) >= self._lookup.most_answers
        ):
            self._forget(self._answers.popleft())
        self._answers.append(answer)
        for place, token in enumerate((_BORDER, *kept, _BORDER), answer.begin):
            self._tokens[place % len(self._tokens)] = token
        latest, earlier, size = self._latest.setdefault(scope, {}), self._earlier, len(self._tokens)
        ngrams = zip(*(kept[number:-1] for number in range(SHORTEST)), strict=False)
        for place, ngram in enumerate(ngrams, answer.begin + 1 + SHORTEST):
            earlier[place % size] = latest.get(ngram, 0)
            latest[ngram] = place
        self._end = answer.end

    def find(self, scope: CacheScope, tokens: Seq[int], most: int, longer_than: int) -> Match:
        """Return at most so many guesses of what follows the tokens, if more of these match than `longer_than`."""
        latest = self._latest.get(scope)
        if latest is None or len(tokens) < SHORTEST:
            return NO_MATCH
        num_best, best = longer_than, list[int]()  # positions, the latest first
        backwards = list(reversed(tokens[-self._lookup.longest :]))
        for place in self._places(latest.get(tuple(tokens[-SHORTEST:]), 0)):
            matched = self._num_matched(backwards, place)
            if matched > num_best:
                num_best, best = matched, []
            if matched == num_best > longer_than:
                best.append(place)
        most = min(most, int(self._lookup.factor * num_best))
        return Match(self._guesses(best, most), num_best) if best else NO_MATCH

    def _guesses(self, places: list[int], most: int) -> tuple[int, ...]:
        """Return what most often followed places, while it is likely enough."""
        guesses, share = list[int](), 1.0
        for number in range(most):
            following = [self._at(place + number) for place in places]
            token, count = following[0], len(places)
            if any(each != token for each in following):
                token, count = Counter(following).most_common(1)[0]  # of equal counts the latest
            share *= count / len(places)
            if token == _BORDER or share < self._lookup.least_share:
                break
            guesses.append(token)
            places = [place for place, each in zip(places, following, strict=True) if each == token]
        return tuple(guesses)

    def _places(self, place: int) -> "list[int]":
        """Return a place and those before it behind the same n-gram, as far as they are kept."""
        found = list[int]()
        oldest = self._answers[0].begin
        while place > oldest and len(found) < _MOST_PLACES:
            found.append(place)
            place = self._earlier[place % len(self._tokens)]
        return found

    def _num_matched(self, backwards: Seq[int], place: int) -> int:
        """Return how many tokens before a place equal the last ones, which come from the last one on."""
        ring, size = self._tokens, len(self._tokens)
        for count in range(SHORTEST, len(backwards)):
            if ring[(place - 1 - count) % size] != backwards[count]:
                return count
        return len(backwards)

    def _at(self, position: int) -> int:
        return self._tokens[position % len(self._tokens)]

    def _forget(self, answer: _Answer) -> None:
        latest = self._latest[answer.scope]
        for place in range(answer.begin + 1 + SHORTEST, answer.end - 1):
            ngram = tuple(self._at(place - SHORTEST + number) for number in range(SHORTEST))
            if latest.get(ngram) == place:
                del latest[ngram]
        if not latest:
            del self._latest[answer.scope]
