from collections import Counter
from dataclasses import replace

import pytest
from scheduled import sequence_of

from faultsim.engine import FakeRunner, expected
from pdserve.base.ids import Attempt, RequestId
from pdserve.engine import scheduler
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Broken, Finish, Job, Sampled, Sequence, Split, Started
from pdserve.engine.step import Phase, StepResult
from pdserve.protocol.paging import PageShape
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SampledToken, SamplingParams

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
        most_drafts: int = 0,
        others: tuple[PageShape, ...] = (),
    ) -> None:
        limits = Limits(4, budget, max_model_len=64, eos_token_ids=eos, num_speculative_tokens=most_drafts)
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB, most_drafts, others)
        self.scheduler = Scheduler(KvCache(num_pages, self.runner.paging, hasher), limits)
        self.drawn: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.widths: list[int] = []

    def add(self, number: int, prompt: list[int], priority: int = 0, **params: int) -> Sequence:
        sequence = sequence_of(number, prompt, SamplingParams(seed=number, **params), priority=priority)
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
                self.drawn.setdefault(number, []).extend(token.token_id for token in outcome.tokens)
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
    published = [len(bench.scheduler.cache.spans) for _ in iter(bench.step, [])]
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


def test_guesses_that_are_right_save_steps_and_change_no_token() -> None:
    alone, guessing = Bench(), Bench(most_drafts=3)
    for bench in (alone, guessing):
        bench.add(1, [1, 2, 3], max_tokens=40)
        bench.run()
        assert bench.drawn[1] == expected([1, 2, 3], 1, 40, VOCAB)
    assert len(alone.widths) == 40
    assert len(guessing.widths) < 32
    assert max(guessing.widths[1:]) == 4


def test_guesses_take_no_page_that_the_next_token_of_another_needs() -> None:
    bench = Bench(num_pages=3)
    bench.scheduler.limits = replace(bench.scheduler.limits, num_speculative_tokens=3)
    guessing, other = bench.add(1, [1] * 3, max_tokens=9), bench.add(2, [2] * 4, max_tokens=9)
    bench.step()
    guessing.drafts = (5, 6, 7)  # the second and third would begin a page, as the other's next token does
    plan = bench.scheduler.plan()
    assert plan is not None
    assert [chunk.num_drafts for chunk in plan.chunks] == [0, 0]
    assert bench.scheduler.num_preemptions == 0
    assert len(other.pages.held) == 2


def test_guesses_get_what_the_next_token_of_each_sequence_leaves_of_the_budget() -> None:
    bench = Bench(budget=5, most_drafts=3)
    for number in range(4):
        bench.add(number, [number], max_tokens=12 if number else 36)
    planned = []
    while (plan := bench.scheduler.plan()) is not None:
        planned.append([(chunk.phase, chunk.num_drafts) for chunk in plan.chunks])
        bench.scheduler.commit(plan, bench.runner.run(plan))
    assert all(len(step) == 4 for step in planned[:3]), "all are in every step"
    guesses = [[count for phase, count in step if phase is Phase.DECODE] for step in planned]
    assert max(map(sum, guesses[:3])) == 1
    assert max(map(max, filter(None, guesses))) == 3, "the longest has the budget to itself in the end"


def test_no_more_guesses_are_computed_than_the_limit_however_many_come() -> None:
    bench = Bench(most_drafts=2)
    bench.runner = FakeRunner(32, PAGE_SIZE, VOCAB, 5)
    sequence, planned = bench.add(1, [9, 8, 7], max_tokens=40), list[int]()
    while bench.step():
        planned.append(len(sequence.drafts))
    assert max(planned) == 2
    assert bench.drawn[1] == expected([9, 8, 7], 1, 40, VOCAB)


def test_nobody_is_preempted_for_a_guess() -> None:
    bench = Bench(num_pages=4, most_drafts=3)
    for number in range(2):
        bench.add(number, [number] * 5, max_tokens=4)  # two pages each, no third one
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert bench.drawn == {number: expected([number] * 5, number, 4, VOCAB) for number in range(2)}


def test_an_answer_ends_with_the_first_kept_token_that_ends_it() -> None:
    tokens = expected([9, 8, 7], 1, 40, VOCAB)
    for last in range(1, 40):
        bench = Bench(most_drafts=3)
        bench.add(1, [9, 8, 7], max_tokens=40, stop_token_ids=(tokens[last],))
        bench.run()
        assert bench.drawn[1] == tokens[: tokens.index(tokens[last]) + 1]


@pytest.mark.parametrize("limits", [{"max_tokens": 100}, {"max_tokens": 9}])
def test_no_guess_is_computed_behind_the_last_token_that_is_allowed(limits: dict[str, int]) -> None:
    bench = Bench(num_pages=256, most_drafts=3)
    for number in range(12):
        bench.add(number, list(range(50)), **limits)
    last = min(64, 50 + limits["max_tokens"])
    while (plan := bench.scheduler.plan()) is not None:
        assert all(chunk.start + len(chunk.token_ids) < last for chunk in plan.chunks), "the last token needs no KV"
        bench.scheduler.commit(plan, bench.runner.run(plan))


def test_a_prompt_stays_a_prompt_to_its_last_token_and_after_a_preemption() -> None:
    bench = Bench(num_pages=9, budget=16)
    prompts = [bench.add(number, [number] * 6, max_tokens=20) for number in range(3)]
    single = bench.add(4, [4], max_tokens=2)
    assert [sequence.phase for sequence in (*prompts, single)] == [Phase.PROMPT] * 4
    computed: Counter[Phase] = Counter()
    while (plan := bench.scheduler.plan()) is not None:
        computed.update(chunk.phase for chunk in plan.chunks for _ in chunk.token_ids)
        bench.scheduler.commit(plan, bench.runner.run(plan))
    assert bench.scheduler.num_preemptions > 0
    assert computed[Phase.PROMPT] > 3 * 6 + 1, "what is computed again is a prompt's"
    assert computed[Phase.DECODE] < 3 * 19 + 1, "and the last token computed again samples what follows"


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
    (drawn,) = [token.token_id for o in outcomes if isinstance(o, Sampled) for token in o.tokens]
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
    pages = gone.pages.held
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
