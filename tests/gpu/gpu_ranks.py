"""Two ranks that hold a model together, on a GPU each: in a dry run two processes over gloo.

They must draw the tokens of the CPU's engine, with steps captured and launched ahead.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import torch
from gpu_device import Device, device_of
from gpu_engine import (
    CHECK_LIMITS,
    CHECK_PAGE_SIZE,
    CHECK_PAGES,
    DRY_LENS,
    DRY_TOKENS,
    NUM_TOKENS,
    PROMPT_LENS,
    mixed_sequences,
    small_config,
    small_model,
    small_weights,
)
from gpu_models import OneByOne, drive
from gpu_report import Case, Row

from pdserve.engine.device_pages import DevicePages
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.rank_group import GroupRanks, device_of_rank
from pdserve.model.config import ModelConfig
from pdserve.model.loading import load_rank
from pdserve.model.weights import Rank
from pdserve.protocol.paging import Paging
from pdserve.settings.degrees import Degrees

DEGREES = Degrees(2)
READY_S, ANSWER_S, JOIN_S = 180.0, 120.0, 60.0
SUM_ROWS, SUM_WIDTH, NUM_SUMS = 8, 4096, 50  # as of a model of 8B that decodes 8 sequences


def cases(device: Device) -> Iterator[Case]:
    """Compare tokens and time sums, where there are two GPUs."""
    if not device.is_dry and (count := torch.cuda.device_count()) < DEGREES.tensor:
        note = f"skipped: {DEGREES.tensor} ranks need a GPU each, and {count} is here"
        yield "ranks", lambda: [Row("ranks", note=note)]
        return
    for family in device.sized(("qwen3 4/2", "llama 9/3"), ("llama 9/3",)):
        yield f"ranks, {family}", partial(_tokens_agree, device, family)


def _tokens_agree(device: Device, family: str) -> Iterator[Row]:
    lens, num_tokens = device.sized((PROMPT_LENS, NUM_TOKENS), (DRY_LENS, DRY_TOKENS))
    plain = OneByOne(Runner(small_model(family, torch.device("cpu")), CHECK_PAGES, CHECK_PAGE_SIZE))
    theirs = drive(plain, _scheduler(), mixed_sequences(lens, num_tokens), 1)
    with Ranks.of(device, family) as ranks:
        ours = drive(ranks, _scheduler(), mixed_sequences(lens, num_tokens), 2)
        wrong = [order for order in range(len(lens)) if ours.texts[order] != theirs.texts[order]]
        agree = f"{len(lens)} sequences of {num_tokens} tokens agree"
        note = f"sequences {wrong} differ" if wrong else agree
        yield Row(f"{family}, 2 ranks: the CPU's tokens", {"ms a token": ours.tpot_ms}, note, failed=bool(wrong))
        yield Row(f"{family}, 2 ranks: sum of {SUM_ROWS} x {SUM_WIDTH}", {"us": ranks.sum_us()})


def _scheduler() -> Scheduler:
    return Scheduler(KvCache(CHECK_PAGES, Paging.of(CHECK_PAGE_SIZE), None), CHECK_LIMITS)


class Ranks:
    """A runner for `drive`: each process has a rank, and all of them start each step."""

    max_in_flight = CudaRunner.max_in_flight

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    @classmethod
    @contextmanager
    def of(cls, device: Device, family: str) -> Iterator["Ranks"]:
        spawning, processes, pipes = multiprocessing.get_context("spawn"), [], []
        with tempfile.NamedTemporaryFile() as store:
            try:
                for index in range(DEGREES.tensor):
                    own, theirs = spawning.Pipe()
                    arguments = (theirs, index, family, device.is_dry, store.name)
                    processes.append(spawning.Process(target=_serve, args=arguments))
                    processes[-1].start()
                    theirs.close()
                    pipes.append(own)
                ranks = cls(pipes)
                ranks.answers(READY_S)
                yield ranks
            finally:
                for pipe in pipes:
                    pipe.close()
                for process in processes:
                    process.join(5)
                    process.kill()
                    process.join()

    def start(self, plan: StepPlan) -> None:
        for pipe in self._pipes:
            pipe.send(plan)

    def finish(self) -> StepResult:
        return cast("StepResult", self.answers()[0])

    def sum_us(self) -> float:
        """Return how long a sum takes, one behind the other."""
        for pipe in self._pipes:
            pipe.send(NUM_SUMS)
        return cast("float", self.answers()[0])

    def answers(self, limit_s: float = ANSWER_S) -> list[object]:
        """Return what each rank answers; RuntimeError if one does not, or fails."""
        found = []
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(limit_s):
                raise RuntimeError(f"rank {index} does not answer")
            try:
                answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {index}: its process has ended") from None
            if isinstance(answer, Exception):
                raise RuntimeError(f"rank {index}: {type(answer).__name__}: {answer}") from answer
            found.append(answer)
        return found


def _serve(pipe: Connection, index: int, family: str, is_dry: bool, store: str) -> None:
    """Compute a rank's part of all that comes, until the pipe ends."""
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    ends = ThreadPoolExecutor(1, "step-ends", _device_of, (index, is_dry))
    try:
        ranks, runner = _rank(index, family, is_dry, store)
        pipe.send("ready")
    except Exception as error:  # noqa: BLE001 - whoever waits is told
        pipe.send(error)
        return
    with suppress(EOFError, OSError):
        while True:
            asked = pipe.recv()
            if isinstance(asked, StepPlan):
                runner.start(asked)
                ends.submit(lambda: pipe.send(runner.finish()))
            else:
                pipe.send(_sum_us(device_of(is_dry=is_dry), ranks, asked))
    os._exit(0)  # Python's own shutdown would wait for NCCL as long as there are graphs


def _device_of(index: int, is_dry: bool) -> torch.device:
    return device_of_rank("interpreter" if is_dry else "cuda", index, DEGREES.tensor)


def _rank(index: int, family: str, is_dry: bool, store: str) -> tuple[GroupRanks, CudaRunner]:
    rank = Rank.at(index, DEGREES)
    ranks = GroupRanks(rank, _device_of(index, is_dry))
    config: ModelConfig = small_config(family)
    model = load_rank(config, small_weights(config), torch.float32, ranks)
    ranks.join(os.open(store, os.O_RDWR), JOIN_S)
    heads = rank.kv_heads(config.num_kv_heads)
    page_elements = config.num_layers * 2 * (heads.stop - heads.start) * CHECK_PAGE_SIZE * config.head_dim
    memory = torch.zeros(CHECK_PAGES * page_elements * 4, dtype=torch.uint8, device=ranks.device)
    part = DevicePages(memory, ranks.spread)
    runner = CudaRunner(model, CHECK_PAGES, CHECK_PAGE_SIZE, CHECK_LIMITS, None, part)
    if not is_dry:
        runner.capture()  # each rank for itself: all capture the same steps, in one order
    return ranks, runner


def _sum_us(device: Device, ranks: GroupRanks, count: int) -> float:
    x = torch.zeros((SUM_ROWS, SUM_WIDTH), dtype=torch.bfloat16, device=ranks.device)

    def sums() -> None:
        for _ in range(count):
            ranks.all_reduce(x)

    sums()
    replay = device.captured(sums)
    device.synchronize()
    started_s = time.perf_counter()
    replay()
    device.synchronize()
    return 1e6 * (time.perf_counter() - started_s) / count
