"""Computes a few steps before a worker is ready: no request meets the first ones, and routers learn what steps cost.

The first step of a kind takes several times as long as the next: memory is taken, kernels are compiled or recorded.
Routers start from the costs of the steps that follow (`Register.trial_steps`).

Invariant: pages that the trial has written are held by nobody when it is over.
"""

import asyncio
from dataclasses import replace
from math import inf

from pdserve.base.ids import MAX_WORKER_TASKS, Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.step import work_of
from pdserve.executor.executor import StartStep
from pdserve.perfmodel.curve import TimedStep
from pdserve.protocol.sampling import SamplingParams

_NUM_DECODED = 3  # steps after a prompt's: so many samples of a short time
_RUNS = 2  # of each size; only the last one counts
# More tokens are tried until a step of twice as many takes this many times as long: then tokens set its time, no longer
# what every step costs, and the rest follows from that.
_GROWS = 1.5


async def warm_up(limits: Limits, pool: KvCache, vocab_size: int, start_step: StartStep) -> tuple[TimedStep, ...]:
    """Compute prompts of a page each, 1, 2, 4, .. at once, and a few tokens after them; return what the steps took.

    Prompts have a few tokens where pages are larger. Their tokens differ, as those of people do: a mixture of experts
    reads more weights for them than for one.
    pool: whose pages nobody uses yet. What a step raises, this raises.
    """
    found: list[TimedStep] = []
    length, before_s = min(pool.paging.few_tokens, limits.max_model_len - _NUM_DECODED - 1), inf
    num_pages, count = pool.paging.num_pages(length + _NUM_DECODED + 1), 1
    while _fits(count * length, count, count * num_pages, limits, pool):
        steps: list[TimedStep] = []
        for _ in range(_RUNS):
            prompts = [[(place + order * length) % vocab_size for place in range(length)] for order in range(count)]
            steps = await _run(prompts, limits, pool, start_step)
        found += steps
        if not steps or steps[0].elapsed_s > _GROWS * before_s:
            break
        before_s, count = steps[0].elapsed_s, 2 * count
    return tuple(found)


def _fits(num_tokens: int, count: int, num_pages: int, limits: Limits, pool: KvCache) -> bool:
    within = num_tokens <= limits.max_num_batched_tokens and count <= min(limits.max_num_seqs, MAX_WORKER_TASKS)
    return num_tokens > 0 and within and num_pages <= pool.pool.num_pages


async def _run(prompts: list[list[int]], limits: Limits, pool: KvCache, start_step: StartStep) -> list[TimedStep]:
    """Compute prompts at once, and what is decoded after them."""
    limits = replace(limits, num_speculative_tokens=0)
    scheduler = Scheduler(KvCache(pool.pool.num_pages, pool.paging, None), limits)
    params = SamplingParams(max_tokens=_NUM_DECODED + 1, ignore_eos=True)
    for order, prompt in enumerate(prompts):
        job = Job(RequestId(bytes(16)), Attempt(0), tuple(prompt), len(prompt), params, (0,))
        scheduler.add(Sequence(job, (0,), prompt, order))
    found = []
    while (plan := scheduler.plan()) is not None:
        result = await asyncio.wrap_future(start_step(plan))
        scheduler.commit(plan, result)
        if not result.failed:  # one that is computed again in halves takes longer
            found.append(TimedStep(work_of(plan), result.elapsed_s))
    return found
