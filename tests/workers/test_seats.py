"""Workers of one machine compute on processors of their own while several of them compute, and on all otherwise."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.executor import threads
from pdserve.executor.threads import NUM_SEATS, SEAT_BYTES, Seat, first_processor, in_cores, thread_defaults
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library

CORES = tuple(sorted(os.sched_getaffinity(0)))
NOW = 10**15  # ns
RECENT = 50_000_000
UNCHANGED = -7


def loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, Missing), found
    return found


def share(index: int, num_processors: int, computed: dict[int, int]) -> tuple[int, int]:
    """Return where a seat's processors begin, or UNCHANGED, and how many they are, by when each seat computed."""
    memory = (ctypes.c_int64 * (NUM_SEATS * SEAT_BYTES // 8))()
    for seat, time in computed.items():
        memory[seat * SEAT_BYTES // 8] = time
    begin, size, find = ctypes.c_int64(UNCHANGED), ctypes.c_int64, loaded().pdserve_share
    find.restype = size
    count = find(memory, size(index), size(num_processors), size(NOW), ctypes.byref(begin))
    return begin.value, count


@pytest.mark.parametrize(
    ("computing", "num_processors", "parts"),
    [
        ((0, 1), 8, [(0, 4), (4, 4)]),
        ((0, 2), 8, [(0, 4), (4, 4)]),
        ((0, 2), 2, [(0, 1), (1, 1)]),  # 1 was replaced
        ((3, 8), 3, [(0, 1), (1, 2)]),
        ((0, 1, 2), 8, [(0, 2), (2, 3), (5, 3)]),
        ((0, 1, 2), 2, [(0, 1), (0, 1), (1, 1)]),
    ],
)
def test_workers_that_compute_at_once_divide_the_processors(
    computing: tuple[int, ...], num_processors: int, parts: list[tuple[int, int]]
) -> None:
    computed = dict.fromkeys(computing, NOW)
    assert [share(index, num_processors, computed) for index in computing] == parts


def test_a_worker_counts_for_a_short_time_after_it_computed_whenever_others_look_first() -> None:
    assert share(0, 8, {1: NOW - RECENT}) == (UNCHANGED, 8)
    assert share(0, 8, {1: NOW - RECENT + 1}) == (0, 4)
    assert share(0, 8, {1: NOW + 1}) == (0, 4)  # it beat after this one looked at the clock
    assert share(0, 8, {0: NOW, 1: 0}) == (UNCHANGED, 8)


def test_a_worker_whose_thread_is_not_bound_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    memory = mmap.mmap(-1, NUM_SEATS * SEAT_BYTES)
    Seat(0, tuple(range(1000, 1999)), memory).use(loaded())
    assert "OpenMP binds no thread to 1000" in caplog.text


COMPUTE = """
import json, os, struct, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pdserve.executor import threads

os.sched_setaffinity(0, json.loads(sys.argv[2]))
threads.FILES = Path(sys.argv[1])
others = [threads.take_seat(Path("weights"), os.sched_getaffinity(0)) for _ in range(2)]
with threads.thread_defaults(os.environ, None, Path("weights")) as seat:
    import torch
    from pdserve.kernels.cpu.calls import Program
    from pdserve.kernels.cpu.library import library
    from pdserve.kernels.cpu.layers import rms_norm


def tasks():
    return set(map(int, os.listdir("/proc/self/task")))


def pauses(task):
    status = Path(f"/proc/self/task/{task}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0]) if "sleeping" in status else time.time()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def run_beside(computed):
    seat.memory[:8] = struct.pack("q", computed)
    program.run(4)
    return sorted(os.sched_getaffinity(0))


def compute():
    seat.use(library())
    before = tasks()
    alone = run_beside(0)
    (helper,) = tasks() - before
    until(lambda: len({pauses(helper) for _ in range(100)}) == 1)  # not a nap while it waits for the caller
    paused = pauses(helper)
    beside = {tuple(run_beside(time.monotonic_ns() + 40_000_000)) for _ in range(10)}  # by the clock of seats.c
    woken = pauses(helper) != paused
    after = run_beside(0)
    until(lambda: sorted(os.sched_getaffinity(helper)) != after)
    return seat.index, alone, sorted(beside), woken, after, sorted(os.sched_getaffinity(helper))


program = Program(library())
rms_norm(program, torch.ones(4, 32), torch.ones(32), 1e-5)
print(json.dumps(ThreadPoolExecutor(1).submit(compute).result()))  # as the engine's thread, which OpenMP binds
"""


@pytest.mark.skipif(len(CORES) < 2, reason="there is one processor")
def test_a_worker_moves_to_its_part_and_wakes_no_thread_on_anothers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPUTE, str(tmp_path), json.dumps(CORES[:2])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    first, second = in_cores(CORES[:2])
    assert json.loads(output) == [2, [first], [[second]], False, [second], [first]]


def test_two_seats_begin_a_half_apart_and_four_a_quarter() -> None:
    assert [first_processor(index, 8) for index in range(4)] == [0, 4, 2, 6]
    assert [first_processor(index, 2) for index in range(4)] == [0, 1, 0, 1]
    assert sorted(first_processor(index, NUM_SEATS) for index in range(NUM_SEATS)) == list(range(NUM_SEATS))


def test_processors_of_one_core_are_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    for processor, (package, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2):
        folder = tmp_path / f"cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert in_cores({7, 6, 5, 4, 3, 2, 1, 0}) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert in_cores({12, 10, 11}) == (10, 11, 12)  # nothing is known


HOLD = """
import os, sys
from pathlib import Path
from pdserve.executor import threads
threads.FILES, threads.TOPOLOGY = Path(sys.argv[1]), Path("/nowhere")
seat = threads.take_seat(Path("weights"), (3, 1, 2))
for path in threads.FILES.glob("*/*.seats"):
    path.read_bytes()  # opens and closes it
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
    (folder,) = tmp_path.iterdir()
    (path,) = folder.iterdir()
    assert [each.stat().st_mode & 0o777 for each in (folder, path)] == [0o700, 0o600]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of seats lie."""
    monkeypatch.setattr(threads, "FILES", tmp_path)
    return tmp_path


def test_another_folder_of_weights_has_other_seats(files: Path) -> None:
    indices = []
    for weights in ("one", "one", "other"):
        seat = threads.take_seat(files / weights, (0, 1))
        assert seat is not None
        indices.append(seat.index)
    assert indices == [0, 1, 0]


def test_all_seats_may_be_taken(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(NUM_SEATS):
        assert threads.take_seat(files, (0, 1)) is not None
    descriptors = len(os.listdir("/proc/self/fd"))
    assert threads.take_seat(files, (0, 1)) is None
    assert f"all of {NUM_SEATS} seats are taken" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.skipif(len(CORES) < 2, reason="there is one processor")
@pytest.mark.parametrize("exists", [False, True])
def test_where_no_seat_can_be_had_threads_are_bound_as_without_others(
    files: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    environment: dict[str, str] = {}
    if exists:
        folder = files / f"pdserve-{os.geteuid()}"
        folder.mkdir()
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(threads, "FILES", files / "shm")
    with thread_defaults(environment, None, files) as seat:
        assert seat is None
    assert ("others than this user may write to it" if exists else "No such file") in caplog.text
    assert environment["OMP_PROC_BIND"] == "true"
    assert "OMP_PLACES" not in environment


@pytest.mark.skipif(len(CORES) < 2, reason="there is one processor")
def test_threads_are_bound_from_the_seat_on_unless_the_user_binds_them(files: Path) -> None:
    environment: dict[str, str] = {}
    with thread_defaults(environment, None, files) as seat:
        assert seat is not None
        assert environment["OMP_PLACES"] == ",".join(f"{{{core}}}" for core in seat.order)
    for own in ({"OMP_PROC_BIND": "close"}, {"OMP_PLACES": "cores"}, {"OMP_NUM_THREADS": "2"}):
        with thread_defaults(dict(own), None, files) as seat:
            assert seat is None
    with thread_defaults({}, 2, files) as seat:
        assert seat is None
