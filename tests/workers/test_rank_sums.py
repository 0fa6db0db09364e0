"""Ranks get the same sums, to the bit, however late one of them comes; one that does not come is named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from socket import socketpair

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.base.errors import DeviceError
from pdserve.executor import rank_sums
from pdserve.executor.rank_memory import mapped_pages, new_pages
from pdserve.executor.rank_sums import SharedRanks, SocketRanks, ranks_of, slots_bytes
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.kernels.cpu.calls import Program
from pdserve.kernels.cpu.library import library
from pdserve.model.stages import Stages
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.settings.degrees import Degrees

LIMIT_S = 60.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTED = """
import sys, torch
from pdserve.executor.rank_sums import ranks_of
from pdserve.executor.rank_memory import mapped_pages
from pdserve.model.weights import Rank
ranks = ranks_of(Rank(1, 2), mapped_pages(int(sys.argv[1])), [], 60.0)
torch.set_num_threads(1)
print("ready", flush=True)
for turn in range(int(sys.argv[2])):
    ranks.all_reduce(torch.full((3, 50_000), float(turn)))
"""


def drawn(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_order(parts: Sequence[Tensor], residual: Tensor | None, scale: float) -> Tensor:
    """Return what a sum is to be: in float32, in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total = total * scale
    return (total if residual is None else total + residual.float()).to(parts[0].dtype)


def shared(size: int, limit_s: float = LIMIT_S) -> list[SharedRanks | SocketRanks]:
    slots = torch.zeros(slots_bytes(Degrees(size)), dtype=torch.uint8)
    return [ranks_of(Rank(index, size), slots, [], limit_s) for index in range(size)]


def of_each(all_ranks: Sequence[object], compute: Callable[[int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(all_ranks)) as threads:
        return list(threads.map(compute, range(len(all_ranks))))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5),
    shapes=st.lists(st.tuples(st.integers(1, 70), st.sampled_from([1, 15, 16, 33, 576, 3000])), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    has_residual=st.booleans(),
    scale=st.sampled_from([1.0, 0.5]),  # exact, so that nothing depends on fused products
)
def test_sums_of_any_size_are_those_in_the_order_of_ranks_to_the_bit_on_all(
    size: int, shapes: list[tuple[int, int]], dtype: torch.dtype, has_residual: bool, scale: float
) -> None:
    all_ranks = shared(size)

    def total_of(index: int) -> Tensor:
        torch.set_num_threads(1)
        found = []
        for turn, shape in enumerate(shapes):
            residual = drawn(1000 + turn, shape, dtype) if has_residual else None
            found.append(all_ranks[index].all_reduce(drawn(10 * turn + index, shape, dtype), residual, scale).flatten())
        return torch.cat(found)

    totals = of_each(all_ranks, total_of)
    expected = []
    for turn, shape in enumerate(shapes):
        parts = [drawn(10 * turn + index, shape, dtype) for index in range(size)]
        residual = drawn(1000 + turn, shape, dtype) if has_residual else None
        expected.append(in_order(parts, residual, scale).flatten())
    assert all(torch.equal(each, torch.cat(expected)) for each in totals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "width", "num_rows"), [(2, 511, 3), (3, 100, 1), (4, 400_001, 2), (5, 5, 70)])
def test_the_first_rank_gets_the_columns_of_all(size: int, width: int, num_rows: int, dtype: torch.dtype) -> None:
    whole, all_ranks = drawn(0, (num_rows, width), dtype), shared(size)

    def gathered(index: int) -> Tensor:
        own = whole[:, index * width // size : (index + 1) * width // size]
        return all_ranks[index].gather(own, width)

    assert torch.equal(of_each(all_ranks, gathered)[0], whole)


@pytest.mark.parametrize("size", [2, 3])
def test_without_a_compiled_library_sockets_carry_sums_and_columns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sums, "library", lambda: Missing(Reason.COMPILER, "none"))
    pairs = [tuple(map(Channel, socketpair())) for _ in range(1, size)]
    channels = [[own for own, _ in pairs], *([theirs] for _, theirs in pairs)]
    nothing = torch.empty(0, dtype=torch.uint8)
    all_ranks = [ranks_of(Rank(index, size), nothing, each, LIMIT_S) for index, each in enumerate(channels)]
    parts, residual = [drawn(index, (3, 7), torch.float32) for index in range(size)], drawn(9, (3, 7), torch.float32)
    totals = of_each(all_ranks, lambda i: all_ranks[i].all_reduce(parts[i].clone(), residual.clone(), 0.5))
    assert all(torch.equal(each, in_order(parts, residual, 0.5)) for each in totals)
    assert torch.equal(of_each(all_ranks, lambda i: all_ranks[i].gather(parts[i], 7 * size))[0], torch.cat(parts, 1))
    for pair in pairs:
        for channel in pair:
            channel.close()


@settings(max_examples=30, deadline=None)
@given(
    num_stages=st.integers(2, 4),
    shapes=st.lists(st.tuples(st.integers(1, 70), st.sampled_from([1, 33, 576, 3000])), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_of_any_size_go_from_each_pipeline_stage_to_the_next_one_in_order(
    num_stages: int, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    slots = torch.zeros(slots_bytes(Degrees(1, num_stages)), dtype=torch.uint8)
    ranks = [Rank.at(index, Degrees(1, num_stages)) for index in range(num_stages)]
    given_rows = [drawn(turn, shape, dtype) for turn, shape in enumerate(shapes)]

    def passed(index: int) -> Tensor:
        stages = ranks_of(ranks[index], slots, [], LIMIT_S)
        assert isinstance(stages, Stages)
        found = []
        for turn, shape in enumerate(shapes):
            x = given_rows[turn] if stages.rank.is_first else stages.receive(*shape, dtype) + 1
            if not stages.rank.is_last:
                stages.send(x)
            found.append(x.flatten())
        return torch.cat(found)

    for rank, found in zip(ranks, of_each(ranks, passed), strict=True):
        expected = given_rows
        for _ in range(rank.stage):
            expected = [x + 1 for x in expected]
        assert torch.equal(found, torch.cat([x.flatten() for x in expected]))


def test_a_neighbour_that_does_not_come_is_named() -> None:
    slots = torch.zeros(slots_bytes(Degrees(1, 3)), dtype=torch.uint8)
    middle = ranks_of(Rank.at(2, Degrees(1, 3)), slots, [], 0.2)
    assert isinstance(middle, Stages)
    middle.check()
    middle.receive(3, 5, torch.float32)
    with pytest.raises(DeviceError, match="pipeline stage 0: it took no part"):
        middle.check()


@contextmanager
def beside(limit_s: float, num_sums: int) -> Iterator[tuple[SharedRanks | SocketRanks, "subprocess.Popen[str]"]]:
    """Yield the first of two ranks; the other one is a process that sums so often, of what it counts."""
    descriptor = new_pages(slots_bytes(Degrees(2)))
    command = (sys.executable, "-c", COUNTED, str(descriptor), str(num_sums))
    process = subprocess.Popen(command, pass_fds=(descriptor,), stdout=subprocess.PIPE, text=True)
    ranks = ranks_of(Rank(0, 2), mapped_pages(descriptor), [], limit_s)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield ranks, process
    finally:
        process.kill()
        process.communicate()


def sum_and_time(ranks: SharedRanks | SocketRanks) -> tuple[Tensor, float]:
    """Return the sum of ones and what the other rank has, and the processor's seconds that it took."""
    torch.set_num_threads(1)
    began_s = time.thread_time()
    return ranks.all_reduce(torch.ones(3, 50_000)), time.thread_time() - began_s


def test_a_rank_that_is_killed_in_a_sum_is_named_within_the_limit_and_later_sums_do_not_wait() -> None:
    with beside(0.5, 10**6) as (ranks, process):
        for turn in range(20):
            assert sum_and_time(ranks)[0].unique().tolist() == [1.0 + turn]
        ranks.check()
        os.kill(process.pid, signal.SIGKILL)  # it is in a sum: it waits for nothing else
        process.wait()
        began_s = time.monotonic()
        for _ in range(10):
            sum_and_time(ranks)
        with pytest.raises(DeviceError, match=r"rank 1: it took no part in a sum for 0\.5 s"):
            ranks.check()
        assert time.monotonic() - began_s < 5.0


@pytest.mark.long
def test_a_frozen_rank_costs_no_time_of_the_processor_and_goes_on_with_right_sums() -> None:
    with beside(LIMIT_S, 21) as (ranks, process), ThreadPoolExecutor(1) as thread:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        waiting = thread.submit(partial(sum_and_time, ranks))
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        os.kill(process.pid, signal.SIGCONT)
        total, took_s = waiting.result(LIMIT_S)
        assert total.unique().tolist() == [1.0]
        assert took_s < 0.2
        for turn in range(1, 21):
            assert sum_and_time(ranks)[0].unique().tolist() == [1.0 + turn]
        ranks.check()


@pytest.mark.long
def test_a_frozen_rank_costs_little_time_where_many_threads_run_a_program() -> None:
    loaded = library()
    assert not isinstance(loaded, Missing)
    with beside(LIMIT_S, 1) as (ranks, process), ThreadPoolExecutor(1) as thread:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        program = Program(loaded)
        ones = torch.ones(3, 50_000)  # calls know only where it lies
        total = ranks.through(program).all_reduce(ones)
        thread.submit(torch.set_num_threads, 16).result()
        began_s = time.process_time()
        running = thread.submit(program.run, 3)
        with pytest.raises(TimeoutError):
            running.result(2.0)
        took_s = time.process_time() - began_s
        os.kill(process.pid, signal.SIGCONT)
        running.result(LIMIT_S)
        assert total.unique().tolist() == [1.0]
        assert took_s < 0.3  # mostly 0.15; 0.5 to 1 where all naps are as short as the first one
        ranks.check()
