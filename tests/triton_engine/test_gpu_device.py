"""What `make gpu` asks of a CUDA that is not there, and what a dry run does not meet of its pair of workers."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_handoff
import gpu_ranks
import pytest
import torch
from gpu_device import MIN_REPLAY_US, REPEATS, Device, Gpu, Interpreter
from gpu_half import write_lanes
from gpu_handoff import Pair
from gpu_report import Case

CALL_US = 10.0


class Graph:
    """Keeps what is called while it is captured, and takes a while to replay it."""

    capturing: "Graph | None" = None
    now_us = 0.0

    def __init__(self) -> None:
        self.num_calls = 0

    def replay(self) -> None:
        Graph.now_us += CALL_US * self.num_calls


class Capture:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        Graph.capturing = self._graph

    def __exit__(self, *_: object) -> None:
        Graph.capturing = None


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._at_us = -1.0

    def record(self) -> None:
        self._at_us = Graph.now_us

    def elapsed_time(self, end: "Event") -> float:
        return (end._at_us - self._at_us) / 1e3

    def query(self) -> bool:
        return True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    replacements: dict[str, object] = {
        "CUDAGraph": Graph,
        "graph": Capture,
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "_sleep": lambda cycles: None,
        "mem_get_info": lambda device=None: (700, 1000),
        "memory_reserved": lambda device: 250,
        "max_memory_reserved": lambda: 300,
        "reset_peak_memory_stats": lambda: None,
        "set_per_process_memory_fraction": lambda share: None,
        "get_device_name": lambda: "a GPU",
    }
    for name, replacement in replacements.items():
        assert hasattr(torch.cuda, name), name
        monkeypatch.setattr(torch.cuda, name, replacement)
    return Gpu()


def test_a_call_is_timed_in_replays_that_last_long_enough(gpu: Gpu) -> None:
    captured: list[int] = []

    def call_of(number: int) -> Callable[[], None]:
        def call() -> None:
            if Graph.capturing is not None:
                Graph.capturing.num_calls += 1
                captured.append(number)

        return call

    assert gpu.time_us([call_of(number) for number in range(3)]) == pytest.approx(CALL_US)
    rounds = min(50, round(MIN_REPLAY_US / (3 * CALL_US)))
    assert captured == [0, 1, 2] * (1 + rounds), "they take turns"
    assert REPEATS >= 5


def test_a_gpu_says_what_it_is_and_has(gpu: Gpu) -> None:
    assert gpu.facts()["gpu"] == "a GPU"
    memory = gpu.memory()
    assert (memory.total, memory.free, memory.reserved, gpu.peak_bytes()) == (1000, 700, 250, 300)
    gpu.forget_peak()
    gpu.limit_share(0.4)
    gpu.empty()
    gpu.synchronize()
    assert gpu.long_work().query()
    assert gpu.clocks().startswith("not read: ")
    assert gpu.sized("real", "tiny") == "real"


@pytest.mark.parametrize(
    ("cases", "missing", "note"),
    [
        (gpu_handoff.nixl, {"psutil"}, "skipped: psutil is not installed"),
        (gpu_handoff.nixl, {"nixl_cu12", "nixl_cu13"}, "skipped: nixl_cu13 or nixl_cu12 is not installed"),
        (gpu_handoff.gloo, {"nixl_cu12", "nixl_cu13", "xxhash"}, "skipped: xxhash is not installed"),
    ],
)
def test_what_is_not_installed_is_skipped_in_one_line(
    cases: Callable[[Device], Iterator[Case]], missing: set[str], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_handoff, "find_spec", lambda name: None if name in missing else name)
    ((_, skipped),) = cases(Interpreter())
    assert [(row.note, row.failed) for row in skipped()] == [(note, False)]


@pytest.mark.parametrize("count", [0, 1])
def test_ranks_are_skipped_in_one_line_where_there_are_fewer_than_two_gpus(
    count: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    ((_, skipped),) = gpu_ranks.cases(gpu)
    note = f"skipped: 2 ranks need a GPU each, and {count} is here"
    assert [(row.note, row.failed) for row in skipped()] == [(note, False)]


def test_the_lane_is_the_one_for_large_runs_into_another_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tables = {
        ("prefill self cfg#0", "remote memory write by ucp_put* from cuda memory to cuda"): "self",
        ("prefill intra-node cfg#1", "active message by ucp_am_send* from host memory"): "tcp/lo",
        ("prefill intra-node cfg#1", "remote memory write by ucp_put* from cuda memory to cuda"): "cuda_ipc/cuda",
    }
    lines = itertools.chain.from_iterable(
        (f"[1] | {one} |", f"[1] | {two} |", "[1] | Range | Description | Config |", "[1] | 0..99 | short | x |",
         f"[1] | 100..inf | zero-copy | {lane} |")
        for (one, two), lane in tables.items()
    )  # fmt: skip
    log.write_text("\n".join(lines))
    assert write_lanes(log) == ["cuda_ipc/cuda, zero-copy"]
    assert write_lanes(tmp_path / "none") == []


@pytest.mark.long
def test_a_worker_of_a_pair_that_fails_or_dies_is_named() -> None:
    with Pair.of(Interpreter(), "nixl") as pair:
        with pytest.raises(RuntimeError, match=r"decode\.release: KeyError: 7"):
            pair.decode.ask("release", 7)
        with pytest.raises(RuntimeError, match=r"prefill\.send: RuntimeError: .* pages, granted page 99"):
            pair.send((0,), (99,))  # type: ignore[arg-type]
        pair.decode._process.kill()
        with pytest.raises(RuntimeError, match="decode: its process has ended with status -9"):
            pair.decode.answer()
