"""A worker computes a few steps before it is ready: no request pays for the first ones, and they leave no trace."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultsim.engine import FakeRunner
from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.step import StepPlan, StepResult, work_of
from pdserve.perfmodel.curve import Curve, DecodePiece, StepCosts, TimedStep
from pdserve.perfmodel.model import costs_of_trial
from pdserve.protocol.paging import PageShape, Paging
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.wire import MAX_TRIAL_STEPS
from pdserve.worker.warm_up import warm_up

PAGE_SIZE, VOCAB = 16, 997
COSTS = StepCosts(Curve(0.05, 1e-3, 0.0), (DecodePiece(None, Curve(0.02, 1e-3, 0.0)),))
COLD = 20  # times as long takes the first step of a shape


class Engine:
    """Steps of known costs, on pages whose use can be seen; the first of each shape is slow."""

    def __init__(self, num_pages: int = 64, costs: StepCosts = COSTS) -> None:
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB)
        self.cache = KvCache(num_pages, Paging.of(PAGE_SIZE), None)
        self.costs = costs
        self.shapes: list[tuple[int, int]] = []
        self.prompts: list[int] = []  # tokens of the largest step

    def start(self, plan: StepPlan) -> Future[StepResult]:
        work = work_of(plan)
        self.prompts = max(self.prompts, [token for chunk in plan.chunks for token in chunk.token_ids], key=len)
        shape = work.prefill_tokens, work.sequences
        elapsed_s = self.costs.seconds(work) * (1 if shape in self.shapes else COLD)
        self.shapes.append(shape)
        future: Future[StepResult] = Future()
        future.set_result(replace(self.runner.run(plan), elapsed_s=elapsed_s))
        return future

    def limits(self, max_num_seqs: int = 64, step_tokens: int = 2048, max_model_len: int = 512) -> Limits:
        return Limits(max_num_seqs, step_tokens, max_model_len, frozenset(range(VOCAB)))  # each token ends an answer

    def warm_up(self, **limits: int) -> tuple[TimedStep, ...]:
        return asyncio.run(warm_up(self.limits(**limits), self.cache, VOCAB, self.start))


def test_costs_on_trial_are_those_of_later_steps_not_of_the_first() -> None:
    engine = Engine()
    found = costs_of_trial(engine.warm_up())
    assert found is not None
    for num_tokens in (16, 30, 64):
        assert found.prefill.seconds(num_tokens, 0) == pytest.approx(COSTS.prefill.seconds(num_tokens, 0), rel=0.2)
    assert found.decode_curve(1).seconds(1, 20) == pytest.approx(0.021, rel=0.1)


def test_a_page_that_no_step_can_fill_leaves_trial_steps() -> None:
    """As those of models with recurrent states, whose pages of K and V are as large as a state."""
    engine = Engine()
    engine.runner = FakeRunner(64, 3216, VOCAB)
    engine.cache = KvCache(64, Paging((PageShape(3216), PageShape(3216, window=2, is_state=True))), None)
    found = engine.warm_up(step_tokens=512)
    assert {step.step.prefill_tokens for step in found} == {0, 64, 128}


def test_a_brief_step_has_few_tokens_of_prompts_however_large_pages_are() -> None:
    for page_size, most in ((16, 16), (3216, 64)):
        scheduler = Scheduler(KvCache(8, Paging.of(page_size), None), Engine().limits())
        job = Job(RequestId(bytes(16)), Attempt(0), tuple(range(100)), 100, SamplingParams(), (0,))
        scheduler.add(Sequence(job, (0,), list(range(100)), 0))
        plan = scheduler.plan(is_brief=True)
        assert plan is not None
        assert plan.num_tokens == most


def test_sizes_double_until_tokens_set_the_time() -> None:
    engine = Engine()
    engine.warm_up()
    # 16 tokens take 66 ms, 32 take 82, 64 take 114, 128 take 178: more than half as long again
    assert sorted({tokens for tokens, _ in engine.shapes}) == [0, 16, 32, 64, 128]
    assert len(set(engine.prompts)) == 128, "tokens that are all the same would choose the same experts"
    flat = Engine(256, StepCosts(Curve(0.05, 0.0, 0.0), COSTS.decode))
    flat.warm_up(max_num_seqs=16)
    assert max(tokens for tokens, _ in flat.shapes) == 16 * PAGE_SIZE, "no more sequences than may run at once"


@given(
    num_pages=st.integers(1, 300),
    max_num_seqs=st.integers(1, 1 << 20),
    step_tokens=st.integers(1, 4096),
    max_model_len=st.integers(1, 600),
    token_s=st.sampled_from([0.0, 1e-3]),
)
def test_a_trial_keeps_to_all_limits_and_tells_no_more_than_routers_take(
    num_pages: int, max_num_seqs: int, step_tokens: int, max_model_len: int, token_s: float
) -> None:
    engine = Engine(num_pages, StepCosts(Curve(0.05, token_s, 0.0), COSTS.decode))
    found = engine.warm_up(max_num_seqs=max_num_seqs, step_tokens=step_tokens, max_model_len=max_model_len)
    assert len(found) <= MAX_TRIAL_STEPS
    assert all(tokens + sequences <= max(step_tokens, 1) for tokens, sequences in engine.shapes)
    assert all(sequences <= max_num_seqs for _, sequences in engine.shapes)
    assert engine.cache.pool.num_free == num_pages, "the worker's own pages are all free"
