"""One cluster from its start to its end, under load and under attack."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.bench.asks import Answers, Ask, Lengths, draw_asks
from pdserve.bench.client import connect
from pdserve.bench.closed_loop import ClosedLoop
from pdserve.bench.outcomes import Outcome, Tally, tally
from pdserve.checkpoint.open import open_checkpoint
from pdserve.cli.status_board import StatusBoard, all_free, not_free, num_ready
from pdserve.clock import MonotonicClock
from pdserve.engine.alone import LoneEngine
from pdserve.launch.havoc import Blow, Havoc, HavocPlan
from pdserve.launch.local import Listener, LocalCluster, running
from pdserve.launch.plan import ClusterSpec
from pdserve.model.loading import load_model

REQUEST_DEADLINE_S = 120.0
FREE_WITHIN_S = 15.0
RECOVER_WITHIN_S = 90.0  # after the last blow, until all workers are ready again
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done to one cluster."""

    name: str
    spec: ClusterSpec
    num_requests: int
    num_clients: int
    havoc: HavocPlan | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it."""

    name: str
    tally: Tally
    blows: tuple[Blow, ...]
    free_after_s: float | None  # of the last answer; None: not all pages within the time
    left_over: str  # what was not free, or not ready again, in words
    num_replaced: int
    ended: dict[str, int]
    outcomes: tuple[Outcome, ...] = field(repr=False, default=())


def expected(model: str, dtype: str, count: int, lengths: Lengths, seed: int) -> tuple[list[Ask], list[Answers]]:
    """Draw requests; return them with the answers of one engine alone."""
    torch.set_num_threads(1)  # for each alone, a small model's steps are too short to share
    checkpoint = open_checkpoint(Path(model))
    asks = draw_asks(count, checkpoint.config.vocab_size, lengths, seed)
    loaded = load_model(checkpoint.config, checkpoint.weights(), DTYPES[dtype])
    engine = LoneEngine(loaded, checkpoint.eos_token_ids, lengths.prompt + lengths.answer)
    return asks, [engine.answer(ask.prompt, ask.params) for ask in asks]


async def run_trial(trial: Trial, asks: Sequence[Ask], due: Sequence[Answers], console: Console) -> Verdict:
    """Start a cluster, load it, hurt it, and look what is left."""
    board = StatusBoard()
    listener = Listener(on_status=board.put, on_notice=lambda text: console.print(text, highlight=False))
    async with running(trial.spec, listener) as cluster:
        await cluster.ready.wait()
        return await _attack(trial, cluster, board, (asks, due), console)


async def _attack(
    trial: Trial,
    cluster: LocalCluster,
    board: StatusBoard,
    work: tuple[Sequence[Ask], Sequence[Answers]],
    console: Console,
) -> Verdict:
    clock, outcomes = MonotonicClock(), list[Outcome]()
    havoc = None if trial.havoc is None else Havoc(lambda: cluster.state, trial.havoc, clock)
    if havoc is not None:
        board.watchers.append(havoc.see)
        havoc.see(board.last)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(trial.name, total=trial.num_requests)

        def on_end(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.advance(bar)
            if not outcome.is_good:
                console.print(f"{outcome}", highlight=False, markup=False)

        async with connect(cluster.state.endpoint) as channel, asyncio.TaskGroup() as tasks:
            striking = None if havoc is None else tasks.create_task(havoc.run())
            loop = ClosedLoop(channel, clock, REQUEST_DEADLINE_S)
            await loop.run(*work, trial.num_requests, trial.num_clients, on_end)
            if striking is not None:
                striking.cancel()
    ended_s = clock.now_s()
    is_free = await board.until(all_free, FREE_WITHIN_S)
    free_after_s, left_over = clock.now_s() - ended_s if is_free else None, not_free(board.last)
    num_workers = len(cluster.state.processes) - 1
    if not await board.until(lambda status: num_ready(status) == num_workers and all_free(status), RECOVER_WITHIN_S):
        left_over = not_free(board.last) or f"{num_ready(board.last)} of {num_workers} workers are ready again"
    return Verdict(
        name=trial.name,
        tally=tally(outcomes),
        blows=() if havoc is None else tuple(havoc.blows),
        free_after_s=free_after_s,
        left_over=left_over,
        num_replaced=board.last.num_replaced,
        ended=dict(board.last.ended),
        outcomes=tuple(outcomes),
    )
