from dataclasses import replace

import pytest

from faultsim.engine import FakeRunner, expected
from pdserve.engine import scheduler
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Broken, Finish, Job, Sampled, Sequence, Split, Started
from pdserve.engine.step import StepResult
from pdserve.ids import Attempt, RequestId
from pdserve.prefix_hash import PrefixHasher
from pdserve.sampling import SampledToken, SamplingParams

VOCAB = 101
PAGE_SIZE = 4


class Bench:
    """A scheduler with an engine of hashes under it."""

    def __init__(
        self,
        num_pages: int = 32,
        budget: int = 8,
        eos: frozenset[int] = frozenset(),
        hasher: PrefixHasher | None = None,
    ) -> None:
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=64, eos_token_ids=eos)
        self.scheduler = Scheduler(KvCache(num_pages, PAGE_SIZE, hasher), limits)
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB)
        self.drawn: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.widths: list[int] = []

    def add(self, number: int, prompt: list[int], priority: int = 0, **params: int) -> Sequence:
        job = Job(
            RequestId(number.to_bytes(16)),
            Attempt(0),
            tuple(prompt),
            len(prompt),
            SamplingParams(seed=number, **params),
            (0,),
            priority=priority,
        )
        sequence = Sequence(job, (0,), list(prompt), order=number)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[object]:
        plan = self.scheduler.plan()
        if plan is None:
            return []
        self.widths.append(plan.num_tokens)
        outcomes = self.scheduler.commit(plan, self.runner.run(plan))
        for outcome in outcomes:
            if isinstance(outcome, Sampled):
                number = int.from_bytes(outcome.sequence.job.request_id)
                self.drawn.setdefault(number, []).append(outcome.token.token_id)
                if outcome.finish is not None:
                    self.finish[number] = outcome.finish
        return list(outcomes)

    def run(self) -> None:
        while self.step():
            self.scheduler.cache.check()
        assert self.scheduler.cache.pool.num_free == self.scheduler.cache.pool.num_pages


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = Bench(budget=8)
    bench.add(1, list(range(20)), max_tokens=2)
    bench.run()
    assert bench.widths == [8, 8, 4, 1]
    assert bench.drawn[1] == expected(range(20), 1, 2, VOCAB)


def test_very_many_pages_that_become_full_at_once_are_published_over_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "_PUBLISHED_AT_ONCE", 2 * PAGE_SIZE)
    bench = Bench(budget=64, hasher=PrefixHasher(b"secret", "model", PAGE_SIZE))
    bench.add(1, list(range(20)), max_tokens=8)
    published = [len(bench.scheduler.cache.pages) for _ in iter(bench.step, [])]
    assert published[:4] == [2, 4, 5, 5]
    assert published[-1] == 6


def test_running_sequences_go_on_while_a_prompt_is_computed() -> None:
    bench = Bench(budget=8)
    bench.add(1, [1], max_tokens=10)
    bench.step()
    bench.add(2, list(range(20)), max_tokens=1)
    bench.run()
    assert bench.widths[1:4] == [8, 8, 7]  # one token of the first, the rest of the budget for the second
    assert bench.drawn[1] == expected([1], 1, 10, VOCAB)


def test_urgent_requests_start_first() -> None:
    bench = Bench(budget=8)
    bench.add(1, list(range(8)), max_tokens=1)
    bench.add(2, list(range(8)), priority=1, max_tokens=1)
    started = [o.sequence.job.priority for _ in range(2) for o in bench.step() if isinstance(o, Started)]
    assert started == [1, 0]


def test_no_more_sequences_run_than_the_limit() -> None:
    bench = Bench()
    for number in range(7):
        bench.add(number, [number], max_tokens=5)
    bench.step()
    assert bench.scheduler.num_running == 4
    bench.run()
    assert len(bench.finish) == 7


def test_a_preempted_sequence_gives_the_same_tokens() -> None:
    bench = Bench(num_pages=9, budget=16)
    for number in range(3):
        bench.add(number, [number] * 6, max_tokens=20)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.drawn == {n: expected([n] * 6, n, 20, VOCAB) for n in range(3)}


@pytest.mark.parametrize(
    ("params", "count", "finish"),
    [
        ({"max_tokens": 5}, 5, Finish.LENGTH),
        ({"max_tokens": 5, "stop_token_ids": True}, 3, Finish.STOP),
        ({"max_tokens": 1}, 1, Finish.LENGTH),
    ],
)
def test_a_sequence_ends_at_its_stop_token_or_its_limit(params: dict[str, int], count: int, finish: Finish) -> None:
    tokens = expected([9, 8, 7], 1, 5, VOCAB)
    bench = Bench()
    stop = {"stop_token_ids": (tokens[2],)} if params.pop("stop_token_ids", None) else {}
    bench.add(1, [9, 8, 7], **params, **stop)
    bench.run()
    assert bench.drawn[1] == tokens[:count]
    assert bench.finish[1] is finish


def test_end_of_sequence_ends_a_sequence_unless_it_is_ignored() -> None:
    tokens = expected([9, 8, 7], 1, 5, VOCAB)
    for ignore, count in ((False, 2), (True, 5)):
        bench = Bench(eos=frozenset({tokens[1]}))
        bench.add(1, [9, 8, 7], max_tokens=5, ignore_eos=ignore)
        bench.run()
        assert bench.drawn[1] == tokens[:count]


def test_a_sequence_that_cannot_be_computed_leaves_the_others_of_its_step_as_they_were() -> None:
    bench = Bench(budget=8)
    broken = bench.add(1, [1, 2, 3], max_tokens=4)
    bench.add(2, [1, 2, 3], max_tokens=4)
    plan = bench.scheduler.plan()
    assert plan is not None
    result = bench.runner.run(plan)
    outcomes = bench.scheduler.commit(plan, replace(result, tokens=((), result.tokens[1]), failed={0: "poison"}))
    assert [o.reason for o in outcomes if isinstance(o, Broken)] == ["poison"]
    (drawn,) = [o.token.token_id for o in outcomes if isinstance(o, Sampled)]
    bench.scheduler.remove(broken)
    bench.run()
    assert [drawn, *bench.drawn[2]] == expected([1, 2, 3], 2, 4, VOCAB)
    pool = bench.scheduler.cache.pool
    assert pool.num_free == pool.num_pages


def test_a_sequence_removed_during_its_step_keeps_its_pages_until_that_is_over() -> None:
    bench = Bench(num_pages=8, budget=8)
    pool = bench.scheduler.cache.pool
    gone = bench.add(1, list(range(8)), max_tokens=4)
    plan = bench.scheduler.plan()
    assert plan is not None
    pages = tuple(gone.pages)
    bench.scheduler.remove(gone)
    assert all(pool.holders(page) == 1 for page in pages)
    assert bench.scheduler.commit(plan, bench.runner.run(plan)) == ()
    assert all(pool.is_free(page) for page in pages)
    bench.run()


def test_a_sequence_stopped_during_a_failing_step_is_not_among_those_it_fails() -> None:
    bench = Bench(budget=8)
    stopped, other = bench.add(1, [1], max_tokens=4), bench.add(2, [2], max_tokens=4)
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.scheduler.remove(stopped)
    assert bench.scheduler.commit(plan, StepResult(((), ()), 0.0, {0: "broken", 1: "broken"})) == (
        Broken(other, "broken"),
    )
    bench.scheduler.remove(other)
    bench.run()


def test_a_page_that_a_step_copies_from_stays_held_though_its_other_sequence_leaves() -> None:
    bench = Bench(num_pages=3, budget=4)
    scheduler, pool = bench.scheduler, bench.scheduler.cache.pool
    job = Job(RequestId(bytes(16)), Attempt(0), (1, 2), 2, SamplingParams(max_tokens=4), (0, 1))
    scheduler.add(Sequence(job, (0, 1), [1, 2], order=1))
    (split,) = [outcome for outcome in bench.step() if isinstance(outcome, Split)]
    plan = scheduler.plan()
    assert plan is not None
    ((source, _),) = plan.copies
    for sibling in split.children:
        scheduler.remove(sibling)
    assert pool.holders(source) == 1
    assert scheduler.commit(plan, bench.runner.run(plan)) == ()
    assert pool.num_free == pool.num_pages


def test_a_sample_keeps_the_tokens_that_its_penalties_see_while_the_sequence_goes_on() -> None:
    params = SamplingParams(presence_penalty=0.5)
    job = Job(RequestId(bytes(16)), Attempt(0), (1, 2, 3), 3, params, (0,))
    sequence = Sequence(job, (0,), [1, 2, 3], order=0)
    specs = []
    for token in (7, 8, 9):
        specs += sequence.samples()
        sequence.append(SampledToken(token))
    assert [tuple(spec.prompt_ids) for spec in specs] == [(1, 2, 3)] * 3
    assert [tuple(spec.output_ids) for spec in specs] == [(), (7,), (7, 8)]
