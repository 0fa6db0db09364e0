"""Workers of one machine compute on processors of their own while several of them compute, and on all otherwise."""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pdserve.kernels.cpu.build import Missing, built
from pdserve.kernels.cpu.calls import Program
from pdserve.kernels.cpu.rows import rms_norm
from pdserve.worker.seats import NUM_SEATS, SEAT_BYTES, Seat, first_processor
from pdserve.worker.threads import thread_defaults

CORES = tuple(sorted(os.sched_getaffinity(0)))
MANY = 8  # processors, as the seats are told


class Worker:
    """A copy of the library with its own threads and seat, as another process has it."""

    def __init__(self, folder: Path, memory: mmap.mmap, index: int, processor: int = CORES[0]) -> None:
        path = built()
        assert not isinstance(path, Missing), path
        self.library = ctypes.CDLL(shutil.copy(path, folder / f"{index}.so"))
        self.library.pdserve_threads_beside_others.restype = ctypes.c_int64
        first = first_processor(index, MANY)
        processors = tuple(processor if number == first else 2000 + number for number in range(MANY))
        self.seat = Seat(index, processors, memory)
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(self._sit).result()

    def _sit(self) -> None:
        os.sched_setaffinity(0, {CORES[0]})
        self.seat.use(self.library)
        os.sched_setaffinity(0, set(CORES))

    def compute(self, num_threads: int = 1, num_rows: int = 4) -> None:
        program, before = Program(self.library), torch.get_num_threads()
        rms_norm(program, torch.ones(num_rows, 32), torch.ones(32), 1e-5)
        torch.set_num_threads(num_threads)
        program.run(num_rows)
        torch.set_num_threads(before)

    def threads_beside(self, *others: "Worker") -> int:
        """Return how many threads this worker computes with after others have just computed."""
        for other in others:
            other.compute()
        return int(self.library.pdserve_threads_beside_others(ctypes.c_int64(MANY)))


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, NUM_SEATS * SEAT_BYTES)


def test_workers_that_compute_at_once_use_the_processors_up_to_the_next_ones_first(
    tmp_path: Path, memory: mmap.mmap
) -> None:
    first, second, third = (Worker(tmp_path, memory, index) for index in range(3))  # at 0, 4 and 2 of 8
    assert [each.threads_beside() for each in (first, second, third)] == [8, 8, 8]
    assert [first.threads_beside(second), second.threads_beside(), third.threads_beside(second)] == [4, 8, 2]
    assert [first.threads_beside(second), second.threads_beside(first), third.threads_beside(first)] == [4, 4, 2]
    assert [first.threads_beside(third), second.threads_beside(third), third.threads_beside(second)] == [2, 4, 2]


def test_a_worker_that_has_stopped_counts_no_more_after_a_short_time(tmp_path: Path, memory: mmap.mmap) -> None:
    first, second = (Worker(tmp_path, memory, index) for index in range(2))
    assert first.threads_beside(second) == 4  # a worker that dies, hangs or is suspended computes no more either
    began = time.monotonic()
    while first.threads_beside() < MANY:
        assert time.monotonic() - began < 5
        time.sleep(0.005)


def test_workers_whose_seats_begin_at_the_same_processor_share_it(tmp_path: Path, memory: mmap.mmap) -> None:
    first, same = Worker(tmp_path, memory, 0), Worker(tmp_path, memory, NUM_SEATS // 2)
    assert [first.threads_beside(same), same.threads_beside(first)] == [8, 8]


def test_a_worker_whose_thread_is_not_bound_changes_nothing(
    tmp_path: Path, memory: mmap.mmap, caplog: pytest.LogCaptureFixture
) -> None:
    unbound, other = Worker(tmp_path, memory, 0, processor=1000), Worker(tmp_path, memory, 1)
    assert "OpenMP binds no thread to 1000" in caplog.text
    assert [unbound.threads_beside(other), other.threads_beside(unbound)] == [8, 8]


def test_a_program_takes_no_more_threads_than_others_leave(tmp_path: Path, memory: mmap.mmap) -> None:
    first, second = (Worker(tmp_path, memory, index) for index in range(2))
    tasks = len(os.listdir("/proc/self/task"))
    second.compute()
    first.compute(MANY)
    assert len(os.listdir("/proc/self/task")) == tasks + 4 - 1


def test_long_calls_count_by_their_pieces(tmp_path: Path, memory: mmap.mmap) -> None:
    worker, counts = Worker(tmp_path, memory, 0), []
    for num_rows in (63, 64):
        worker.compute(num_rows=num_rows)
        counts.append(int.from_bytes(memory[:8], "little"))
    assert counts == [1, 1 + 16 + 1]


def test_two_seats_begin_a_half_apart_and_four_a_quarter() -> None:
    assert [first_processor(index, 8) for index in range(4)] == [0, 4, 2, 6]
    assert [first_processor(index, 2) for index in range(4)] == [0, 1, 0, 1]
    assert sorted(first_processor(index, NUM_SEATS) for index in range(NUM_SEATS)) == list(range(NUM_SEATS))


HOLD = """
import sys
from pathlib import Path
from pdserve.worker.seats import take_seat
seat = take_seat(Path(sys.argv[1]), (3, 1, 2))
print(None if seat is None else (seat.index, seat.order), flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process that takes a seat; yield it and the seat."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_each_process_has_a_seat_of_its_own_until_it_ends(tmp_path: Path) -> None:
    with holding(tmp_path) as (first, seat), holding(tmp_path) as (_, other):
        assert [seat, other] == ["(0, (1, 2, 3))", "(1, (2, 3, 1))"]
        first.kill()
        first.wait()
        with holding(tmp_path) as (_, next_one):
            assert next_one == seat
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_where_no_seat_can_be_had_threads_are_bound_as_without_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment: dict[str, str] = {}
    tmp_path.chmod(0o777)
    with thread_defaults(environment, None, tmp_path) as seat:
        assert seat is None
    assert "others than this user may write to it" in caplog.text
    assert environment["OMP_PROC_BIND"] == "true"
    assert "OMP_PLACES" not in environment


@pytest.mark.skipif(len(CORES) < 2, reason="there is one processor")
def test_threads_are_bound_from_the_seat_on_unless_the_user_binds_them(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    with thread_defaults(environment, None, tmp_path) as seat:
        assert seat is not None
        assert environment["OMP_PLACES"] == ",".join(f"{{{core}}}" for core in seat.order)
    for own in ({"OMP_PROC_BIND": "close"}, {"OMP_PLACES": "cores"}, {"OMP_NUM_THREADS": "2"}):
        with thread_defaults(dict(own), None, tmp_path) as seat:
            assert seat is None
    with thread_defaults({}, 2, tmp_path) as seat:
        assert seat is None
