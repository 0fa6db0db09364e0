"""The engine of a worker of two ranks with a GPU each, as `pdserve worker` starts it; it exchanges pages with one rank.

It must draw the tokens of the CPU's engine, and pages must arrive as they were sent.
"""

import json
import queue
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_device import Device
from gpu_engine import (
    CHECK_LIMITS,
    CHECK_PAGE_SIZE,
    CHECK_PAGES,
    DRY_LENS,
    DRY_TOKENS,
    FAMILIES,
    NUM_TOKENS,
    PROMPT_LENS,
    SHAPE,
    mixed_sequences,
    small_config,
    small_model,
    small_weights,
)
from gpu_models import OneByOne, drive
from gpu_report import Case, Row
from held_weights import read_all
from safetensors.torch import save_file

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import StepPlan, StepResult
from pdserve.protocol.page_tables import Pages

if TYPE_CHECKING:
    from pdserve.executor.executor import Executor
    from pdserve.kvtransfer.doors import ReceiverMessage
    from pdserve.kvtransfer.ranked_mover import AnyMover
    from pdserve.settings.config import WorkerConfig

NAMES = ("llama 9/3", "gemma3, pages of windows", "deepseek-v3, 16 heads")  # heads, groups of layers, copies of rows
NUM_RANKS = 2
STEP_S, COPY_S = 120.0, 60.0
NEEDED = ("msgspec", "prometheus_client", "psutil", "pydantic", "tokenizers", "xxhash")


def cases(device: Device) -> Iterator[Case]:
    """Compare tokens, then copy pages from two ranks to one and back, where there are two GPUs and all packages."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing or not any(map(find_spec, ("nixl_cu13", "nixl_cu12"))):
        note = f"skipped: {', '.join(missing or ['nixl'])} is not installed"
    elif not device.is_dry and (count := torch.cuda.device_count()) < NUM_RANKS:
        note = f"skipped: {NUM_RANKS} ranks need a GPU each, and {count} is here"
    else:
        for family in device.sized(NAMES, NAMES[-1:]):
            yield f"worker of ranks, {family}", partial(_rows, device, family)
        return
    yield "worker of ranks", lambda: [Row("worker of ranks", note=note)]


def _rows(device: Device, family: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), family)
        config, alone = (_config(device, Path(folder), num_ranks) for num_ranks in (NUM_RANKS, 1))
        with _executor(config) as ours, _executor(alone) as theirs:
            yield _tokens_agree(device, family, ours)
            yield from _pages_arrive(family, (config, alone), (ours, theirs))


def _write_model(folder: Path, family: str) -> None:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **FAMILIES[family]}))
    weights = read_all(small_weights(small_config(family)))
    save_file({name: values.contiguous() for name, values in weights.items()}, folder / "model.safetensors")


def _config(device: Device, folder: Path, num_ranks: int) -> "WorkerConfig":
    from pdserve.settings.config import WorkerConfig, load_config  # noqa: PLC0415 - may be missing

    limits = {"max_num_seqs": CHECK_LIMITS.max_num_seqs, "max_num_batched_tokens": CHECK_LIMITS.max_num_batched_tokens}
    pages = {"num_pages": CHECK_PAGES, "page_size": CHECK_PAGE_SIZE, "max_model_len": CHECK_LIMITS.max_model_len}
    ranks = {"device": device.sized("cuda", "interpreter"), "tensor_parallel_size": num_ranks, "rank_memory": "own"}
    names = {"model": str(folder), "worker_id": f"ranks-{num_ranks}", "role": "decode", "routers": ("127.0.0.1:1",)}
    fixed = {"secret_file": folder / "secret", "dtype": "float32"}
    return load_config(WorkerConfig, flags={**limits, **pages, **ranks, **names, **fixed})


@contextmanager
def _executor(config: "WorkerConfig") -> "Iterator[Executor]":
    from pdserve.worker.boot import build_engine, open_model  # noqa: PLC0415 - needs what may be missing

    executor = build_engine(config, open_model(config), b"secret", lambda _: None).executor
    with closing(executor):
        yield executor


class _Started:
    """An executor as a runner for `drive`."""

    max_in_flight = 2

    def __init__(self, executor: "Executor") -> None:
        self._executor, self._steps = executor, deque[Future[StepResult]]()

    def start(self, plan: StepPlan) -> None:
        self._steps.append(self._executor.start(plan))

    def finish(self) -> StepResult:
        return self._steps.popleft().result(STEP_S)


def _tokens_agree(device: Device, family: str, executor: "Executor") -> Row:
    lens, num_tokens = device.sized((PROMPT_LENS, NUM_TOKENS), (DRY_LENS, DRY_TOKENS))
    plain = Runner(small_model(family, torch.device("cpu")), CHECK_PAGES, CHECK_PAGE_SIZE)
    schedulers = [Scheduler(KvCache(CHECK_PAGES, paging_of(plain.groups), None), CHECK_LIMITS) for _ in range(2)]
    theirs = drive(OneByOne(plain), schedulers[0], mixed_sequences(lens, num_tokens), 1)
    ours = drive(_Started(executor), schedulers[1], mixed_sequences(lens, num_tokens), 2)
    wrong = [order for order in range(len(lens)) if ours.texts[order] != theirs.texts[order]]
    note = f"sequences {wrong} differ" if wrong else f"{len(lens)} sequences of {num_tokens} tokens agree"
    return Row(f"{family}, a worker of 2 ranks", {"ms a token": ours.tpot_ms}, note, failed=bool(wrong))


def _pages_arrive(
    family: str, configs: "tuple[WorkerConfig, WorkerConfig]", executors: "tuple[Executor, Executor]"
) -> Iterator[Row]:
    """Copy pages of the texts from the ranks to the one, and from there to others of the ranks; compare digests.

    A copy counts if the pages that it is to fill differed before, as a copy to other pages has told.
    """
    from pdserve.worker.boot import build_mover  # noqa: PLC0415

    peers = [Peer(WorkerId(config.worker_id), Incarnation(1)) for config in configs]
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    with ExitStack() as open_movers:
        movers = [
            open_movers.enter_context(closing(build_mover(*given, stopped.put, b"secret")))
            for given in zip(configs, peers, executors, strict=True)
        ]
        written, blank, other = (
            tuple(map(PageId, range(first, first + 8))) for first in (0, CHECK_PAGES - 8, CHECK_PAGES - 16)
        )
        for source, target, num_parts, pages in ((0, 1, NUM_RANKS, written), (1, 0, 1, blank)):
            movers[source].attach(peers[target], movers[target].describe())
            reach = movers[source], peers[target]
            digests, lost = _copied(reach, pages, other, [stopped] * num_parts)
            was_there = not lost and movers[target].first_mismatch(blank, digests) != 0
            digests, lost = (digests, lost) if lost else _copied(reach, pages, blank, [stopped] * num_parts)
            wrong = lost or was_there or movers[target].first_mismatch(blank, digests) is not None
            note = f"8 pages from {num_parts} ranks: {'differ' if wrong else 'arrived'} {lost}"
            yield Row(f"{family}: pages, {num_parts} -> {3 - num_parts} ranks", note=note, failed=bool(wrong))


def _copied(
    reach: "tuple[AnyMover, Peer]", pages: Pages, to: Pages, ends_of: "list[queue.SimpleQueue[ReceiverMessage]]"
) -> tuple[tuple[int, ...], list[str]]:
    """Copy pages to a peer's; return their digests, and why parts of the copy were lost. ends_of: of each part."""
    from pdserve.kvtransfer.doors import CopyStopped  # noqa: PLC0415 - needs what may be missing
    from pdserve.kvtransfer.session import of_parts  # noqa: PLC0415 - the same

    mover, peer = reach
    mover.write(peer, AttemptKey(RequestId(bytes(16)), Attempt(0)), pages, to)
    ends = [end for each in ends_of if isinstance(end := each.get(timeout=COPY_S).event, CopyStopped)]
    if lost := [end.reason for end in ends if end.digests is None]:
        return (), lost
    return of_parts([end.digests for end in ends if end.digests is not None]), []
