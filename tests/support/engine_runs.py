"""Whole engines, with their executors: jobs go in, and answers come out; steps may be started ahead."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rank_pages import ranks
from scheduled import sequence_of
from worker_settings import built, settings_of

from pdserve.engine.sequence import Broken, Sampled
from pdserve.engine.step import StepPlan, StepResult, work_of
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import WorkerConfig
from pdserve.worker.boot import Engine

Asked = tuple[Sequence[int], SamplingParams]
LIMIT_S = 120.0


def worker_config(folder: Path, **settings: object) -> WorkerConfig:
    """Return the settings of a small decode worker in float32."""
    small = {"num_pages": 40, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 128}
    return settings_of(folder, **{**small, "dtype": "float32", **settings})


@contextmanager
def engine_of(config: WorkerConfig) -> Iterator[Engine]:
    """Yield a worker's engine; no process of it is left behind."""
    try:
        engine = built(config)
        try:
            yield engine
        finally:
            engine.executor.close()
    finally:
        assert not ranks()


def tokens_of(result: StepResult) -> list[list[int]]:
    """Return the first token of each sample of each chunk."""
    return [[tokens[0].token_id for tokens in chunk] for chunk in result.tokens]


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of some jobs."""

    texts: dict[tuple[int, int], list[int]]  # by job and continuation
    num_cached: int  # tokens that were not computed
    num_ahead: int  # steps that were started while another one was under way
    num_guesses: int  # that were verified
    num_right: int
    drafted: list[tuple[list[int], tuple[int, ...]]]  # tokens, and what a draft model or head guessed behind them


def answers(engine: Engine, asked: Sequence[Asked], depth: int = 2) -> Answers:
    """Compute jobs together, with so many steps under way.

    Steps count as if each of their tokens and guesses took as long, so how many guesses pay is the same everywhere.
    """
    scheduler, running = engine.scheduler, [sequence_of(number, *each) for number, each in enumerate(asked)]
    for sequence in running:
        scheduler.add(sequence)
    texts: dict[tuple[int, int], list[int]] = {}
    in_flight, num_ahead, num_guesses, num_right = deque[tuple[StepPlan, Future[StepResult]]](), 0, 0, 0
    drafted = list[tuple[list[int], tuple[int, ...]]]()
    while True:
        plan = scheduler.plan() if len(in_flight) < depth else None
        if plan is not None:
            num_ahead += len(in_flight)
            in_flight.append((plan, engine.executor.start(plan)))
            continue
        if not in_flight:
            num_cached = sum(each.num_cached_tokens for each in running)
            return Answers(texts, num_cached, num_ahead, num_guesses, num_right, drafted)
        plan, step = in_flight.popleft()
        result = _timed(plan, step.result(LIMIT_S))
        work = work_of(plan, result)
        for place, guesses in result.drafts.items():
            known = [*scheduler.steps[0].sequences[place].tokens, *[each.token_id for each in result.tokens[place][0]]]
            drafted.append((known, guesses))
        num_guesses, num_right = num_guesses + work.guesses, num_right + work.kept_guesses
        for outcome in scheduler.commit(plan, result):
            assert not isinstance(outcome, Broken), outcome
            if isinstance(outcome, Sampled):
                text = texts.setdefault((outcome.sequence.order, outcome.index), [])
                text += [token.token_id for token in outcome.tokens]


def _timed(plan: StepPlan, result: StepResult) -> StepResult:
    draft_s = 0.0005 * max([0, *map(len, result.drafts.values())])
    return replace(result, elapsed_s=0.01 + 0.0001 * plan.num_tokens + draft_s, draft_s=draft_s)
