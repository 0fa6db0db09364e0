"""A step planned while the one before it runs gives the tokens of steps planned one by one, and writes to no page that
has been given back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import Scheduled, sequence_of

from faultsim.engine import FakeRunner, expected
from pdserve.base.errors import InvariantError
from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits
from pdserve.engine.sequence import Broken, Job, Outcome, Sampled, Sequence, Split
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.failing import Isolating
from pdserve.protocol.paging import PageShape, Paging
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SampledToken, SamplingParams, TokenLogprobs

VOCAB = 101
PAGE_SIZE = 4


class Bench(Scheduled):
    """A scheduler over an engine of hashes, whose steps run `depth` at a time where it lets them."""

    def __init__(
        self,
        num_pages: int = 32,
        budget: int = 8,
        depth: int = 2,
        most_drafts: int = 0,
        others: tuple[PageShape, ...] = (),  # groups of layers after the first
        hasher: PrefixHasher | None = None,
    ) -> None:
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB, most_drafts, others)
        cache, limits = KvCache(num_pages, self.runner.paging, hasher), Limits(4, budget, 48, frozenset(), most_drafts)
        super().__init__(cache, limits, Isolating(self.runner.run).run, depth)
        self.alive: dict[int, list[Sequence]] = {}

    def add(self, number: int, prompt: list[int], indices: tuple[int, ...] = (0,), **params: object) -> None:
        settings = SamplingParams(seed=number, **params)  # type: ignore[arg-type]
        sequence = sequence_of(number, prompt, settings, indices)
        self.alive[number] = [sequence]
        self.scheduler.add(sequence)

    def cancel(self, number: int) -> None:
        for sequence in self.alive.pop(number, []):
            self.scheduler.remove(sequence)
        self.check()

    def turn(self) -> bool:
        has_done = super().turn()
        self.check()
        return has_done

    def run(self) -> None:
        super().run()
        pool = self.scheduler.cache.pool
        assert pool.num_free == pool.num_pages

    def check(self) -> None:
        """No step in flight has a page that is free; the pool adds up."""
        self.scheduler.cache.check()
        chunks = [chunk for plan, _ in self.running for chunk in plan.chunks]
        in_flight = {page for chunk in chunks for pages in (chunk.pages, *chunk.other_pages) for page in pages}
        assert [page for page in in_flight if self.scheduler.cache.pool.is_free(page)] == []

    def note(self, outcome: Outcome) -> None:
        number = outcome.sequence.order
        assert number in self.alive, "told of a sequence that was given up"
        super().note(outcome)
        match outcome:
            case Sampled(sequence, index, finish=finish) if finish is not None and sequence.indices == (index,):
                self.alive[number].remove(sequence)
            case Split(_, children):
                self.alive[number] = list(children)


def test_decode_steps_follow_each_other_without_waiting_for_tokens() -> None:
    bench = Bench()
    bench.add(1, [9, 8, 7], max_tokens=12)
    bench.run()
    assert bench.answers[1, 0] == expected([9, 8, 7], 1, 12, VOCAB)
    assert bench.num_ahead == 11  # each but the first


def test_a_step_ahead_names_the_chunk_its_token_comes_from() -> None:
    bench = Bench()
    for number in (1, 2):
        bench.add(number, [number], max_tokens=3)
    first, second = bench.scheduler.plan(), bench.scheduler.plan()
    assert first is not None
    assert second is not None
    assert [chunk.previous for chunk in first.chunks] == [None, None]
    assert [(chunk.previous, chunk.start, tuple(chunk.token_ids)) for chunk in second.chunks] == [
        (0, 1, (0,)),
        (1, 1, (0,)),
    ]
    assert [chunk.samples[0].index for chunk in second.chunks] == [1, 1]


def test_no_more_than_two_steps_run_at_a_time() -> None:
    bench = Bench()
    bench.add(1, [1], max_tokens=9)
    assert bench.scheduler.plan() is not None
    assert bench.scheduler.plan() is not None
    with pytest.raises(InvariantError):
        bench.scheduler.plan()


def test_a_stop_found_late_drops_the_token_computed_too_far() -> None:
    tokens = expected([9, 8, 7], 1, 6, VOCAB)
    bench = Bench()
    bench.add(1, [9, 8, 7], max_tokens=6, stop_token_ids=(tokens[2],))
    bench.run()
    assert bench.answers[1, 0] == tokens[:3]


def test_a_page_of_a_sequence_that_ended_is_held_until_the_step_after_is_over() -> None:
    tokens = expected([9, 8, 7], 1, 6, VOCAB)
    bench = Bench(num_pages=4)
    bench.add(1, [9, 8, 7], max_tokens=6, stop_token_ids=(tokens[0],))
    assert (bench.turn(), bench.turn()) == (True, True)
    free = bench.scheduler.cache.pool.num_free
    bench.turn()  # the first step ends, and with it the sequence, while the second still writes
    assert bench.answers[1, 0] == tokens[:1]
    assert bench.scheduler.cache.pool.num_free == free < 4
    bench.run()


def test_a_limit_is_known_beforehand_and_costs_no_step() -> None:
    bench = Bench()
    bench.add(1, [1], max_tokens=1)
    assert bench.turn()
    assert bench.scheduler.plan() is None


class Reading(FakeRunner):
    """Notes the answer that each sample is given, by the token's index."""

    def __init__(self) -> None:
        super().__init__(32, PAGE_SIZE, VOCAB)
        self.read: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            assert chunk.previous is None
            self.read |= {spec.index: list(spec.output_ids) for spec in chunk.samples}
        return super().run(plan)


@pytest.mark.parametrize(
    ("params", "is_read"),
    [
        ({"presence_penalty": 1.0}, True),
        ({"repetition_penalty": 2.0}, True),
        ({"bad_word_ids": ((7,), (9, 8))}, True),
        ({"bad_word_ids": ((7,), (9,))}, False),
        ({"logprobs": 2}, False),
    ],
)
def test_a_sample_that_depends_on_the_answer_gets_all_of_it_in_steps_planned_ahead(
    params: dict[str, object], is_read: bool
) -> None:
    bench, runner = Bench(), Reading()
    bench.compute = Isolating(runner.run).run
    bench.add(1, [1], max_tokens=5, **params)
    bench.run()
    assert bench.num_ahead == 4
    assert runner.read == {index: bench.answers[1, 0][:index] if is_read else [] for index in range(5)}


def test_a_sample_planned_ahead_says_what_it_lacks() -> None:
    bench = Bench()
    bench.add(1, [1], max_tokens=5, frequency_penalty=1.0)
    plans = [bench.scheduler.plan(), bench.scheduler.plan()]
    first, second = [plan.chunks[0] for plan in plans if plan is not None]
    assert (first.samples[0].lacks_output, second.samples[0].lacks_output) == (False, True)
    known = second.after(40)
    assert (tuple(known.token_ids), known.previous) == ((40,), None)
    assert (list(known.samples[0].output_ids), known.samples[0].lacks_output) == ([40], False)
    assert known.after(41).samples == known.samples


def test_a_sequence_that_fails_is_dropped_from_the_step_planned_ahead_as_well() -> None:
    bench = Bench()
    bench.add(1, [1], max_tokens=9)
    (broken,) = bench.alive[1]
    bench.add(2, [2], max_tokens=9)
    bench.turn()
    bench.turn()
    (first, brought), (second, brought_then) = bench.running
    result = brought()
    outcomes = bench.scheduler.commit(first, replace(result, tokens=((), result.tokens[1]), failed={0: "poison"}))
    assert Broken(broken, "poison") in outcomes
    bench.scheduler.remove(broken)
    kept = bench.scheduler.commit(second, brought_then())
    assert {outcome.sequence.job.request_id for outcome in kept} == {RequestId((2).to_bytes(16))}


JOBS = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt
        st.integers(1, 12),  # answer
        st.sampled_from([(0,), (0,), (0,), (0, 1)]),
        st.booleans(),  # penalties
        st.none() | st.integers(0, 11),  # which of its tokens stops it
        st.none() | st.integers(1, 30),  # given up after so many turns
    ),
    min_size=1,
    max_size=6,
)


GROUPS = ((), (), (PageShape(4, window=3),), (PageShape(2, window=5),), (PageShape(2), PageShape(1, window=2)))


@settings(deadline=None)
@given(
    jobs=JOBS,
    num_spare=st.integers(0, 13),
    budget=st.integers(4, 12),
    most_drafts=st.sampled_from((0, 0, 1, 3)),
    others=st.sampled_from(GROUPS),
    hasher=st.sampled_from((None, PrefixHasher(b"secret", "model", PAGE_SIZE))),
)
def test_whatever_ends_when_tokens_are_those_of_steps_one_by_one(
    jobs: list[tuple],  # type: ignore[type-arg]
    num_spare: int,
    budget: int,
    most_drafts: int,
    others: tuple[PageShape, ...],
    hasher: PrefixHasher | None,
) -> None:
    num_pages = Paging((PageShape(PAGE_SIZE), *others)).num_pages(14 + 12) + num_spare
    bench = Bench(num_pages, budget, most_drafts=most_drafts, others=others, hasher=hasher)
    wanted: dict[tuple[int, int], list[int]] = {}
    gives_up: dict[int, int] = {}
    for number, (length, count, indices, penalized, stop, patience) in enumerate(jobs):
        prompt = [(number % 2 * 7 + i) % VOCAB for i in range(length)]
        tokens = expected(prompt, number, count, VOCAB, others)
        stops = (tokens[stop],) if stop is not None and stop < count else ()
        end = tokens.index(stops[0]) + 1 if stops else count
        if indices == (0,):
            wanted[number, 0] = tokens[:end]
        gives_up |= {number: patience} if patience is not None else {}
        penalty = 0.5 if penalized else 0.0
        bench.add(number, prompt, indices, max_tokens=count, stop_token_ids=stops, presence_penalty=penalty)
    turn = 0
    while bench.turn():
        turn += 1
        for number in [n for n, patience in gives_up.items() if patience == turn]:
            bench.cancel(number)
    assert bench.scheduler.cache.pool.num_free == num_pages
    for (number, index), tokens in wanted.items():
        got = bench.answers.get((number, index), [])
        assert got == tokens if number not in gives_up else got == tokens[: len(got)]


def test_a_step_ahead_preempts_nobody() -> None:
    num_preemptions = []
    for depth in (1, 2):
        bench = Bench(num_pages=7, budget=16, depth=depth)
        for number in range(3):
            bench.add(number, [number] * 6, max_tokens=14)
        bench.run()
        assert {n: bench.answers[n, 0] for n in range(3)} == {n: expected([n] * 6, n, 14, VOCAB) for n in range(3)}
        num_preemptions.append(bench.scheduler.num_preemptions)
    assert num_preemptions[1] == num_preemptions[0] > 0


def test_a_held_sequence_is_settled_once_both_steps_that_have_it_are_over() -> None:
    bench = Bench()
    bench.add(1, [9, 8, 7], max_tokens=12)
    (sequence,) = bench.alive[1]
    assert (bench.turn(), bench.turn()) == (True, True)
    settled = []
    while bench.running:
        settled.append(bench.scheduler.hold(sequence))
        bench.end_oldest()
    assert settled == [False, False]
    assert bench.scheduler.hold(sequence)
    assert bench.answers[1, 0] == expected([9, 8, 7], 1, 2, VOCAB)
    assert sequence.computed == len(sequence.tokens) - 1 == bench.scheduler.num_written(sequence)
    assert bench.scheduler.plan() is None
    bench.scheduler.resume(sequence)
    bench.run()
    assert bench.answers[1, 0] == expected([9, 8, 7], 1, 12, VOCAB)


def test_a_held_sequence_keeps_its_pages_when_others_find_none() -> None:
    bench = Bench(num_pages=7, budget=16)
    for number in range(3):
        bench.add(number, [number] * 6, max_tokens=14)
    held = bench.alive[2][0]  # the first that would give its pages up
    while not held.num_output_tokens:
        bench.turn()
    bench.scheduler.hold(held)
    while bench.scheduler.num_preemptions == 0:
        assert bench.turn()
    assert held.pages
    bench.scheduler.resume(held)
    bench.run()
    assert {n: bench.answers[n, 0] for n in range(3)} == {n: expected([n] * 6, n, 14, VOCAB) for n in range(3)}


def test_a_sequence_that_goes_on_writes_beside_a_page_that_somebody_else_holds() -> None:
    bench = Bench()
    bench.add(1, [9, 8, 7], max_tokens=12)
    (sequence,) = bench.alive[1]
    while sequence.num_output_tokens < 3:
        bench.turn()
    while not bench.scheduler.hold(sequence):
        bench.turn()
    pool, last = bench.scheduler.cache.pool, sequence.pages.held[-1]
    assert sequence.computed % PAGE_SIZE, "its last page is not full"
    pool.share([last])  # as a hand-off does
    kept = bytes(bench.runner.page(last))
    bench.scheduler.resume(sequence)
    while bench.turn():
        assert bytes(bench.runner.page(last)) == kept
    pool.release((last,))
    assert bench.answers[1, 0] == expected([9, 8, 7], 1, 12, VOCAB)
    assert pool.num_free == pool.num_pages


@settings(deadline=None)
@given(data=st.data(), num_pages=st.integers(7, 20), depth=st.integers(1, 2))
def test_whoever_is_held_and_resumed_when_gets_the_same_tokens(data: st.DataObject, num_pages: int, depth: int) -> None:
    bench = Bench(num_pages, depth=depth)
    for number in range(3):
        bench.add(number, [number] * (2 + number), max_tokens=12)
    for number in data.draw(st.lists(st.integers(0, 5), max_size=60)):
        for sequence in bench.alive.get(number, []):
            if sequence.is_held:
                bench.scheduler.resume(sequence)
            elif sequence in bench.scheduler.running:
                bench.scheduler.hold(sequence)
        bench.turn()
        for each in bench.scheduler.running:
            if each.is_held and bench.scheduler.hold(each):
                assert not {p for plan, _ in bench.running for c in plan.chunks for p in c.pages} & {
                    each.pages.held[-1]
                }
    for sequence in [s for sequences in bench.alive.values() for s in sequences if s.is_held]:
        bench.scheduler.resume(sequence)
    bench.run()
    assert {n: bench.answers[n, 0] for n in range(3)} == {n: expected([n] * (2 + n), n, 12, VOCAB) for n in range(3)}


def test_a_tail_has_the_log_probabilities_that_were_asked_for() -> None:
    params = SamplingParams(max_tokens=9, logprobs=1)
    job = Job(RequestId(bytes(16)), Attempt(0), (1, 2, 3), 2, params, (0,))
    sequence = Sequence(job, (0,), [1, 2, 3], order=0)
    sampled = [SampledToken(token, TokenLogprobs(-float(token), ())) for token in (7, 8, 9)]
    for token in sampled:
        sequence.append(token)
    assert sequence.tail(3) == tuple(sampled)
    assert sequence.tail(5) == (sampled[2],)
    plain = Sequence(job, (0,), [1, 2, 3], order=0)
    plain.append(SampledToken(7))
    assert plain.tail(3) == (SampledToken(7),)
