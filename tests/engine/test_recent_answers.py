"""Guesses from other answers are what most often followed the longest match, of the same tenant and adapter alone."""

from collections import Counter
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine import recent_answers
from pdserve.engine.guesses import NO_MATCH, AnswerLookup, Match, NgramLookup
from pdserve.engine.kvcache import KvCache
from pdserve.engine.recent_answers import MOST_WAITING, SHORTEST, RecentAnswers
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.step import StepPlan, StepResult
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import EVERYONE, CacheScope
from pdserve.protocol.sampling import SamplingParams

LONGEST, LEAST = 5, 0.4
LOOKUP = AnswerLookup(LONGEST, 100, LEAST, 2.0)
OTHERS = CacheScope("others")
TOKENS = st.lists(st.integers(0, 2), max_size=14)


def expected(kept: Seq[Seq[int]], tokens: Seq[int], most: int, longer_than: int) -> Match:
    """Return what a look at every place says. kept: of one scope, the oldest first."""
    places = [(answer, end) for answer in reversed(kept) for end in range(len(answer) - 1, 0, -1)]

    def matched(answer: Seq[int], end: int) -> int:
        counts = range(min(LONGEST, end, len(tokens)), SHORTEST - 1, -1)
        return next((n for n in counts if list(answer[end - n : end]) == list(tokens[-n:])), 0)

    best = max((matched(*place) for place in places), default=0)
    if best <= longer_than:
        return NO_MATCH
    following = [list(answer[end:]) for answer, end in places if matched(answer, end) == best]
    guesses, share = list[int](), 1.0
    while len(guesses) < min(most, 2 * best):
        nexts = [each[len(guesses)] if len(each) > len(guesses) else None for each in following]
        token, count = Counter(nexts).most_common(1)[0]
        share *= count / len(following)
        if token is None or share < LEAST:
            break
        following = [each for each, own in zip(following, nexts, strict=True) if own == token]
        guesses.append(token)
    return Match(tuple(guesses), best)


@given(st.lists(st.tuples(st.sampled_from((EVERYONE, OTHERS)), TOKENS), max_size=9), TOKENS, st.integers(1, 6))
def test_guesses_are_what_most_often_followed_the_longest_match_among_the_answers_that_are_kept(
    given_answers: list[tuple[CacheScope, list[int]]], tokens: list[int], most: int
) -> None:
    capacity = 40
    answers, kept = RecentAnswers(LOOKUP, capacity), list[tuple[CacheScope, list[int]]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_answers, "_MOST_PLACES", 1000)
        for scope, answer in given_answers:
            answers.remember(scope, answer, 0)
            answers.index_one()
            if len(answer) > SHORTEST:
                kept.append((scope, answer))
            while sum(len(each) + 2 for _, each in kept) > capacity:
                kept.pop(0)
            for longer_than in (0, 3):
                found = answers.find(EVERYONE, tokens, most, longer_than)
                assert found == expected([each for own, each in kept if own == EVERYONE], tokens, most, longer_than)


def test_no_more_answers_are_kept_than_asked_for_and_nothing_is_left_of_the_others() -> None:
    answers = RecentAnswers(AnswerLookup(LONGEST, 2, 0.0, 9.0))
    for first in range(0, 900, 10):
        answers.remember(CacheScope(str(first % 30)), range(first, first + 8), 0)
        answers.index_one()
    assert [len(each) for each in answers._latest.values()] == [6, 6]
    assert answers.find(CacheScope("20"), (890, 891, 892), 3, 0) == Match((893, 894, 895), 3)
    assert answers.find(CacheScope("10"), (890, 891, 892), 3, 0) == NO_MATCH, "they are another tenant's"
    assert answers.find(CacheScope("0"), (870, 871, 872), 3, 0) == NO_MATCH, "they are forgotten"


def test_the_end_of_a_prompt_is_kept_before_its_answer_and_of_a_long_answer_its_end() -> None:
    answers, prompt = RecentAnswers(LOOKUP), list(range(100, 200))
    answers.remember(EVERYONE, [*prompt, 1, 2, 3], len(prompt))
    answers.index_one()
    assert answers.find(EVERYONE, prompt, 9, 0) == Match((1, 2, 3), LONGEST)
    assert answers.find(EVERYONE, prompt[:50], 9, 0) == NO_MATCH
    answers.remember(EVERYONE, range(1000, 9000), 0)
    answers.index_one()
    assert answers.find(EVERYONE, (8000, 8001), 2, 0) == Match((8002, 8003), 2)
    assert answers.find(EVERYONE, (6000, 6001), 2, 0) == NO_MATCH


def sequence_of(scope: CacheScope, prompt: Seq[int], answer: Seq[int]) -> Sequence:
    params = SamplingParams(max_tokens=100)
    job = Job(RequestId(bytes(16)), Attempt(0), tuple(prompt), len(prompt), params, (0,), scope)
    return Sequence(job, (0,), [*prompt, *answer], 0)


def test_answers_wait_for_a_time_between_steps_and_no_more_than_some_do() -> None:
    answers = RecentAnswers(LOOKUP)
    for first in range(0, 10 * MOST_WAITING + 10, 10):
        answers.remember(EVERYONE, range(first, first + 8), 0)
    assert answers.find(EVERYONE, (20, 21), 3, 0) == NO_MATCH
    answers.index_one()
    assert answers.find(EVERYONE, (0, 1), 3, 0) == NO_MATCH, "it had to make room"
    assert answers.find(EVERYONE, (10, 11), 3, 0) == Match((12, 13, 14), 2)
    for _ in range(MOST_WAITING):
        answers.index_one()
    assert answers.find(EVERYONE, (640, 641), 3, 0) == Match((642, 643, 644), 2)


def stepped(scheduler: Scheduler) -> None:
    """Let nothing be computed: what is done between steps is done."""
    scheduler.speculation.learn([], StepPlan(()), StepResult((), 0.0))


def test_a_sequence_is_guessed_from_what_was_answered_before_unless_it_says_more_itself() -> None:
    limits = Limits(4, 64, 500, frozenset(), num_speculative_tokens=8, guesser=NgramLookup(SHORTEST, LONGEST, LOOKUP))
    scheduler = Scheduler(KvCache(40, Paging.of(16), None), limits)
    made = scheduler.speculation
    assert made.source == "suffix"
    for answer in ((10, 11, 12, 13), (20,)):  # the second one is what a hand-off leaves behind
        ended = sequence_of(EVERYONE, (1, 2, 3), answer)
        scheduler.join(ended)
        scheduler.remove(ended)
        stepped(scheduler)
    same = sequence_of(EVERYONE, (7, 2, 3), (10,))
    made.guess(same, (), 8)
    assert (same.drafts, same.guessing.num_matched, same.guessing.source) == ((11, 12, 13), 3, "suffix")
    other = sequence_of(OTHERS, (7, 2, 3), (10,))
    made.guess(other, (), 8)
    assert other.drafts == ()
    itself = sequence_of(EVERYONE, (7, 2, 3, 10, 30, 31), (7, 2, 3, 10))
    made.guess(itself, (), 2)
    assert (itself.drafts, itself.guessing.num_matched, itself.guessing.source) == ((30, 31), 4, "ngram")
    found = []
    for _ in range(20):
        made.guess(same, (), 8)
        found.append(same.drafts)
    assert found == [(11, 12, 13)] * 13 + [()] * 7, "between two steps there are 16 lookups"
    stepped(scheduler)
    made.guess(same, (), 8)
    assert same.drafts == (11, 12, 13)
