"""As many guesses are verified as pay; what is guessed followed the same tokens before."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine import speculation
from pdserve.engine.guesses import NO_MATCH, AnswerLookup, DraftsBy, NgramIndex, NgramLookup, Trials
from pdserve.engine.running_step import Progress, next_chunk
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.speculation import Speculation
from pdserve.engine.step import Chunk, Draft, Phase, StepPlan, StepResult
from pdserve.perfmodel.curve import Step
from pdserve.protocol.drafts import DraftSource, Verified
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SampledToken, SamplingParams

LOOKUP = NgramLookup(2, 4)
OF_ANSWERS = NgramLookup(2, 4, AnswerLookup(8, 10, 0.1, 1.0))
FLAT, STEEP = (0.010, 0.0001), (0.0001, 0.010)  # seconds of a step, and of each of its rows


def sequence_of(tokens: Seq[int]) -> Sequence:
    job = Job(RequestId(bytes(16)), Attempt(0), tuple(tokens), 1, SamplingParams(max_tokens=1000), (0,))
    pages = PageTables(([],))
    return Sequence(job, (0,), list(tokens), 0, phase=Phase.DECODE, computed=len(tokens) - 1, pages=pages)


def speculation_of(costs: tuple[float, float], most: int = 8) -> Speculation:
    made = Speculation(most, LOOKUP)
    for _ in range(20):
        for rows in range(1, 33):
            made.observe(Step(sequences=rows, kv_tokens=rows * 29), costs[0] + rows * costs[1])
    return made


def verified(made: Speculation, sequence: Sequence, num_guesses: int, num_right: int) -> None:
    """Take in a step that verified guesses of one sequence."""
    chunk = Chunk((0,) * (1 + num_guesses), 0, (), (), Phase.DECODE, num_drafts=num_guesses)
    tokens = tuple(SampledToken(0) for _ in range(1 + num_right))
    made.learn([sequence], StepPlan((chunk,)), StepResult(((tokens,),), 0.0))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 7))
def test_guesses_are_what_followed_the_longest_match_that_was_looked_at(
    tokens: list[int], shortest: int, more: int, most: int
) -> None:
    lookup = NgramLookup(shortest, shortest + more)
    index = NgramIndex(lookup)
    while index.num_indexed < len(tokens):
        assert index.extend(tokens, 7) <= 7
    found, end = index.find(tokens, most), len(tokens)

    def matched(place: int) -> int:
        counts = range(min(lookup.longest, place), 0, -1)
        return next((n for n in counts if tokens[place - n : place] == tokens[end - n :]), 0)

    looked_at = [place for place in range(end - 1, 0, -1) if matched(place) >= shortest][:8]
    if not looked_at:
        assert found == NO_MATCH
        return
    best = max(looked_at, key=lambda place: (matched(place), place))
    ahead = list(tokens)
    for _ in range(most):
        ahead.append(ahead[best + len(ahead) - end])
    assert found.guesses == tuple(ahead[end:])
    assert found.num_matched == matched(best)


@pytest.mark.parametrize(
    ("made", "found", "source"),
    [
        (Speculation(8, LOOKUP), DraftSource.NGRAM, "ngram"),
        (Speculation(8, OF_ANSWERS), DraftSource.NGRAM, "ngram"),
        (Speculation(8, OF_ANSWERS), DraftSource.SUFFIX, "suffix"),
        (Speculation(8, DraftsBy(DraftSource.DRAFT_MODEL, 100)), None, "draft_model"),
        (Speculation(8, DraftsBy(DraftSource.MTP, 100)), None, "mtp"),
    ],
)
def test_guesses_are_told_by_where_they_came_from_as_far_as_they_are_in_the_answer(
    made: Speculation, found: DraftSource | None, source: str
) -> None:
    sequence, chunk = sequence_of([1, 2, 3]), Chunk((0,) * 6, 0, (), (), Phase.DECODE, num_drafts=5)
    sequence.guessing.source = found
    assert [made.verified(sequence, chunk, num_right) for num_right in (0, 2, 5)] == [
        Verified(DraftSource(source), 5, num_right) for num_right in (0, 2, 5)
    ]
    assert made.verified(sequence, replace(chunk, num_drafts=0), 0) is None


def test_a_long_prompt_is_indexed_between_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_INDEXED_AT_ONCE", 40)
    made, sequence = speculation_of(FLAT), sequence_of([*range(30)] * 3)
    for _ in range(2):
        made.learn([], StepPlan(()), StepResult((), 0.0))
        made.guess(sequence, (), 100)
        assert sequence.drafts == ()
    made.learn([], StepPlan(()), StepResult((), 0.0))
    made.guess(sequence, (), 100)
    assert sequence.drafts == tuple(range(8))


def test_no_more_is_guessed_than_may_be_sampled() -> None:
    made, sequence = speculation_of(FLAT), sequence_of([*range(10)] * 3)
    for most in (3, 0, -1):
        made.guess(sequence, (), most)
        assert len(sequence.drafts) == max(0, most)
        made.guess(sequence, (1, 2, 3, 4, 5), most)
        assert len(sequence.drafts) == max(0, most)
    of_a_runner = Speculation(4, None)
    for most, kept in ((9, 4), (3, 3), (0, 0)):
        of_a_runner.guess(sequence, (1, 2, 3, 4, 5), most)
        assert sequence.drafts == (1, 2, 3, 4, 5)[:kept]


def test_all_guesses_are_verified_where_rows_cost_little_and_none_where_they_cost_a_step() -> None:
    for costs, wanted in ((FLAT, 8), (STEEP, 0)):
        made, sequence = speculation_of(costs), sequence_of([*range(10)] * 3)
        made.guess(sequence, (), 100)
        assert len(sequence.drafts) == 8
        verified(made, sequence, 8, 8)
        assert made.counts([sequence]).get(sequence, 0) == wanted


def test_fewer_are_verified_the_more_sequences_there_are() -> None:
    """A row costs the more of what it brings, the more rows there are already: so do these costs."""
    made = Speculation(8, LOOKUP)
    for _ in range(20):
        for rows in (*range(1, 33), 48, 63, 64, 96, 127, 128, 192, 255, 256):
            made.observe(Step(sequences=rows, kv_tokens=rows * 29), 0.010 + 0.00002 * rows**2)
    sequences = [sequence_of([*range(10)] * 3) for _ in range(64)]
    for sequence in sequences:
        made.guess(sequence, (), 8)
        verified(made, sequence, 4, 3)
    found = [sum(made.counts(sequences[:count]).values()) / count for count in (1, 4, 16, 64)]
    assert found[0] > 4
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0


def test_a_sequence_whose_guesses_are_right_gets_more_than_one_whose_are_wrong() -> None:
    made = speculation_of((0.010, 0.002))
    good, bad = sequence_of([*range(10)] * 3), sequence_of([*range(10)] * 3)
    for _ in range(10):
        for sequence, num_right in ((good, 8), (bad, 0)):
            made.guess(sequence, (), 8)
            verified(made, sequence, 8, num_right)
    counts = made.counts([good, bad])
    assert counts.get(good, 0) > 3
    assert counts.get(bad, 0) == 0


def test_what_did_not_pay_is_tried_again_in_time() -> None:
    made, sequence = speculation_of((0.010, 0.002)), sequence_of([*range(10)] * 3)
    made.guess(sequence, (), 8)
    for _ in range(50):
        verified(made, sequence, 1, 0)
    untried = 0
    while not made.counts([sequence]):
        untried += 1
        assert untried < 5000
    assert untried > 100


def step_of(made: Speculation, sequence: Sequence, seconds: Callable[[int], float]) -> int:
    """Let a sequence take a step, all of whose guesses are right; return how many tokens that brings."""
    made.guess(sequence, (), 100)
    count = made.counts([sequence]).get(sequence, 0)
    chunk = Chunk((0,) * (1 + count), sequence.computed, (), (), Phase.DECODE, num_drafts=count)
    tokens = tuple(SampledToken(0) for _ in range(1 + count))
    made.learn([sequence], StepPlan((chunk,)), StepResult(((tokens,),), seconds(1 + count)))
    return 1 + count


@pytest.mark.parametrize("slower", [1.5, 3, 10])
@pytest.mark.parametrize("num_slow", [1, 3])
def test_slow_first_steps_of_a_size_are_forgotten(slower: float, num_slow: int) -> None:
    made, sequence, num_seen = Speculation(10, LOOKUP), sequence_of([*range(10)] * 3), Counter[int]()
    for _ in range(3):
        made.observe(Step(sequences=1, kv_tokens=29), 0.0308)

    def seconds(rows: int) -> float:
        size = rows.bit_length()
        num_seen[size] += 1
        return (0.030 + 0.0008 * rows) * (slower if rows > 1 and num_seen[size] <= num_slow else 1.0)

    gained = [step_of(made, sequence, seconds) for _ in range(3000)]
    assert sum(gained[-200:]) > 200 * 9


def test_sequences_without_guesses_wait_little_for_those_with_many() -> None:
    made = speculation_of((0.010, 0.002))
    with_guesses, without = sequence_of([*range(10)] * 3), sequence_of(list(range(100, 130)))
    for sequence in (with_guesses, without):
        made.guess(sequence, (), 8)
    for _ in range(3):
        verified(made, with_guesses, 8, 8)
    assert made.counts([with_guesses])[with_guesses] == 8
    assert 0 < made.counts([with_guesses, without])[with_guesses] <= 2  # a row takes a seventh of what both take


def test_a_share_of_right_guesses_begins_with_what_is_expected_and_ends_with_what_was_seen() -> None:
    trials = Trials()
    assert trials.share(0.25) == 0.25
    for _ in range(100):
        trials.note(3, ended_wrong=True)
    assert trials.share(0.25) == pytest.approx(0.75, abs=0.05)
    trials.fade(0.0)
    assert trials.share(0.25) == 0.25


def drafted(made: Speculation, sequence: Sequence, pass_s: float, num_right: int) -> None:
    """Take in a step that verified four guesses of a draft model, after which it made four more."""
    chunk = Chunk((0,) * 5, sequence.computed, (), (), Phase.DECODE, num_drafts=4, draft=Draft((), 30, 4))
    tokens = tuple(SampledToken(0) for _ in range(1 + num_right))
    result = StepResult(((tokens,),), 0.010 + 4 * pass_s, drafts={0: (1, 2, 3, 4)}, draft_s=4 * pass_s)
    made.learn([sequence], StepPlan((chunk,)), result)


@pytest.mark.parametrize(("pass_s", "num_right", "wanted"), [(0.001, 4, 8), (0.001, 0, 0), (0.020, 4, 0)])
def test_a_draft_model_guesses_as_much_as_pays_with_its_own_time(pass_s: float, num_right: int, wanted: int) -> None:
    made, sequence = Speculation(8, DraftsBy(DraftSource.DRAFT_MODEL, 1000)), sequence_of(range(30))
    for rows in range(1, 10):
        for _ in range(20):
            made.observe(Step(sequences=rows, kv_tokens=rows * 29), 0.010 + 0.0001 * rows)
    for _ in range(40):
        drafted(made, sequence, pass_s, num_right)
        made.ask_for_drafts([sequence], {}, 100)
    assert sequence.guessing.num_to_draft == wanted
    made.ask_for_drafts([sequence], {}, 0)
    assert sequence.guessing.num_to_draft == 0, "prompts take all of the next step"


def test_a_prompt_is_taken_in_by_parts_before_guesses_are_made() -> None:
    made, sequence = Speculation(8, DraftsBy(DraftSource.DRAFT_MODEL, 1000)), sequence_of(range(300))
    fed = []
    while not fed or fed[-1][1] < 299:
        made.ask_for_drafts([sequence], {}, 100)
        chunk = next_chunk(sequence, Progress(0, 0, 0), 1, Paging.of(16))
        assert chunk.draft is not None
        fed.append((chunk.draft.start, chunk.draft.start + len(chunk.draft.token_ids)))
        result = StepResult(
            (((SampledToken(0),),),), 0.010, drafts={0: () if fed[-1][1] < 299 else (5,)}, draft_s=0.001
        )
        made.learn([sequence], StepPlan((chunk,)), result)
    assert fed == [(0, 16), (16, 32), (32, 48), (48, 176), (176, 299)], "a few, until their time is known"
    assert sequence.guessing.num_drafted == 301, "and the sampled token"


def test_a_worker_that_does_not_speculate_guesses_nothing() -> None:
    made, sequence = Speculation(0, None), sequence_of([*range(10)] * 3)
    made.guess(sequence, (1, 2), 8)
    assert sequence.drafts == ()
    assert made.counts([sequence]) == {}
