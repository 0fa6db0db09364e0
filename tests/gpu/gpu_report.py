"""Times GPU work, and lays the figures out as tables."""

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import triton

WARM_UPS = 3
REPEATS = 15
MIN_REPLAY_US = 2000.0
SMI_FIELDS = "clocks.sm,clocks.mem,clocks_throttle_reasons.active,temperature.gpu,power.draw"


@dataclass(frozen=True, slots=True)
class Row:
    """A check's or a benchmark's outcome."""

    name: str
    time_us: float | None = None
    rate: float | None = None
    unit: str = ""
    peers: dict[str, float] = field(default_factory=dict)  # name -> microseconds
    note: str = ""
    failed: bool = False


def table(title: str, rows: list[Row]) -> str:
    """Lay rows out as short lines: name, our time, our rate, then each peer's time and how much faster we are."""
    lines = [f"\n== {title}"]
    for row in rows:
        words = [f"{row.name:<44}"]
        if row.time_us is not None:
            words.append(f"{row.time_us:10.1f} us")
        if row.rate is not None:
            words.append(f"{row.rate:8.1f} {row.unit}")
        for peer, time_us in row.peers.items():
            faster = f" ({time_us / row.time_us:.2f}x)" if row.time_us else ""
            words.append(f"{peer} {time_us:.1f}{faster}")
        if row.failed:
            words.append("FAILED")
        lines.append("  ".join([*words, row.note]))
    return "\n".join(lines) + "\n"


def has_gpu() -> bool:
    return torch.cuda.is_available()


def machine() -> dict[str, str]:
    """Describe the machine that the figures come from."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def clocks() -> str:
    """Return clocks, throttling, temperature and power, or why they cannot be read."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not read: {error}"
    return done.stdout.strip()


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median time of one call in microseconds; `calls` should rotate over different data.

    The calls are captured together in a graph, so that launches from Python are not timed, and often enough that one
    replay lasts a few milliseconds.
    """
    for call in calls:
        for _ in range(WARM_UPS):
            call()
    torch.cuda.synchronize()
    once = _replayed_us(calls, 1)
    rounds = max(1, min(50, round(MIN_REPLAY_US / max(once, 1.0))))
    return _replayed_us(calls, rounds) / (rounds * len(calls))


def _replayed_us(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for turn in range(WARM_UPS + REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if turn >= WARM_UPS:
            times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))
