"""What the scheduler adds to a decode step: the time to plan it and to take its result in, without any engine."""

import gc
from statistics import median
from time import process_time

from pdserve.base.ids import Attempt, RequestId
from pdserve.base.values import value
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.step import StepResult
from pdserve.protocol.paging import PageShape, Paging
from pdserve.protocol.sampling import SampledToken, SamplingParams

_WARM_UP = 20  # steps
_PROMPT = 20  # tokens


@value
class PlanSpeed:
    """CPU seconds of planning and committing one decode step."""

    num_sequences: int
    num_groups: int
    least_s: float
    median_s: float


def measure_planning(num_sequences: int, num_steps: int, others: tuple[PageShape, ...] = ()) -> PlanSpeed:
    """Measure decode steps of sequences without prefix cache. others: groups of layers after the first."""
    length, paging = _PROMPT + num_steps + _WARM_UP + 2, Paging((PageShape(16), *others))
    num_pages, budget = num_sequences * paging.num_pages(length), num_sequences * _PROMPT
    limits = Limits(num_sequences, budget, length, frozenset())
    scheduler = Scheduler(KvCache(num_pages, paging, None), limits)
    for number in range(num_sequences):
        params = SamplingParams(seed=number, max_tokens=length - _PROMPT)
        prompt = tuple(range(_PROMPT))
        job = Job(RequestId(number.to_bytes(16)), Attempt(0), prompt, _PROMPT, params, (0,))
        scheduler.add(Sequence(job, (0,), list(prompt), order=number))
    gc.disable()  # as workers do while a step is planned
    taken_s = [_step(scheduler) for _ in range(_WARM_UP + num_steps)][_WARM_UP:]
    gc.enable()
    return PlanSpeed(num_sequences, len(paging.shapes), min(taken_s), median(taken_s))


def _step(scheduler: Scheduler) -> float:
    begun_s = process_time()
    plan = scheduler.plan()
    planned_s = process_time()
    assert plan is not None
    result = StepResult(tuple(((SampledToken(5),),) if chunk.samples else () for chunk in plan.chunks), 0.0)
    computed_s = process_time()
    scheduler.commit(plan, result)
    return process_time() - computed_s + planned_s - begun_s
