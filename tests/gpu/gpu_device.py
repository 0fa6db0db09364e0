"""The machine that sections run on: a GPU, or a CPU on which Triton interprets.

A dry run walks through the same sections with tiny shapes on a CPU. Only what CUDA alone has differs, and stands here.
"""

import gc
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import triton
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pdserve.engine.gpu_memory import GpuMemory

T = TypeVar("T")
Call = Callable[[], object]

WARM_UPS = 3
REPEATS = 15
PROFILED = 5
MIN_REPLAY_US = 2000.0
LONG_CYCLES = 2_000_000_000  # about a second
SMI_FIELDS = "clocks.sm,clocks.mem,clocks_throttle_reasons.active,temperature.gpu,power.draw"
DRY_BYTES = 64 << 20  # of memory that a dry run claims to have


class Mark(Protocol):
    """A moment in the device's work."""

    def query(self) -> bool:
        """Return whether the device has come there."""
        ...


class Device:
    """What sections ask of either machine."""

    name = ""
    is_dry = False
    half = torch.bfloat16  # what models compute in
    _activity: ProfilerActivity
    _kind: DeviceType

    def __init__(self, *, is_thorough: bool = False) -> None:
        self.is_thorough = is_thorough  # every check, and not a part of them
        self.torch = torch.device(self.name)

    def sized(self, real: T, tiny: T) -> T:
        """Return what a GPU gets, or what a dry run gets."""
        return tiny if self.is_dry else real

    def time_us(self, calls: Sequence[Call]) -> float:
        """Return the median time of one call in microseconds; `calls` should rotate over different data."""
        raise NotImplementedError

    def captured(self, call: Call) -> Call:
        """Return what does again what the call does, on the same memory."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for the device; raises what went wrong there."""
        raise NotImplementedError

    def long_work(self) -> Mark:
        """Keep the device busy for about a second; returns the end of that."""
        raise NotImplementedError

    def memory(self) -> GpuMemory:
        raise NotImplementedError

    def peak_bytes(self) -> int:
        """Return the most that torch has reserved since `forget_peak`."""
        raise NotImplementedError

    def forget_peak(self) -> None:
        raise NotImplementedError

    def limit_share(self, share: float) -> None:
        """Let torch take no more than this share of the device's memory in this process."""
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        """Describe the machine and its software."""
        raise NotImplementedError

    def clocks(self) -> str:
        """Return clocks, throttling, temperature and power, or why they cannot be read."""
        raise NotImplementedError

    def num_processes(self, wanted: int) -> int:
        """Return how many processes may compile at a time."""
        return min(wanted, self.sized(os.cpu_count() or 1, 1))

    def kernel_us(self, call: Call) -> dict[str, float]:
        """Return how long each kernel runs in one call, in microseconds by name, longest first."""
        call()
        self.synchronize()
        count = self.sized(PROFILED, 1)
        with profile(activities=[self._activity]) as profiled:
            for _ in range(count):
                call()
            self.synchronize()
        found: dict[str, float] = defaultdict(float)
        for event in profiled.events() or ():
            if event.device_type == self._kind:
                found[event.name] += event.time_range.elapsed_us() / count
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def empty(self) -> None:
        """Give memory back that nobody uses."""
        gc.collect()


class Gpu(Device):
    """The first CUDA device."""

    name = "cuda"
    _activity = ProfilerActivity.CUDA
    _kind = DeviceType.CUDA

    def time_us(self, calls: Sequence[Call]) -> float:
        """Time replays: the calls are captured together, often enough that one replay lasts a few milliseconds."""
        for call in calls:
            for _ in range(WARM_UPS):
                call()
        torch.cuda.synchronize()
        once = self._replayed_us(calls, 1)
        rounds = max(1, min(50, round(MIN_REPLAY_US / max(once, 1.0))))
        return self._replayed_us(calls, rounds) / (rounds * len(calls))

    def _replayed_us(self, calls: Sequence[Call], rounds: int) -> float:
        def work() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        replay, times = self.captured(work), []
        for turn in range(WARM_UPS + REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_UPS:
                times.append(start.elapsed_time(end) * 1e3)
        return float(statistics.median(times))

    def captured(self, call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def long_work(self) -> Mark:
        torch.cuda._sleep(LONG_CYCLES)
        over = torch.cuda.Event()
        over.record()
        return over

    def memory(self) -> GpuMemory:
        return GpuMemory.of(torch.device("cuda", torch.cuda.current_device()))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def limit_share(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share)

    def facts(self) -> dict[str, str]:
        return {
            "gpu": torch.cuda.get_device_name(),
            "memory": f"{torch.cuda.mem_get_info()[1] >> 20} MiB",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "cores": str(os.cpu_count()),
        }

    def clocks(self) -> str:
        command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"not read: {error}"
        return done.stdout.strip()

    def empty(self) -> None:
        super().empty()
        torch.cuda.empty_cache()


class Interpreter(Device):
    """A CPU. Its figures mean nothing; that there are any says that the section's code runs."""

    name = "cpu"
    is_dry = True
    half = torch.float32  # Triton's interpreter cuts bfloat16 off, and the CPU's own products take other token ids
    _activity = ProfilerActivity.CPU
    _kind = DeviceType.CPU

    def time_us(self, calls: Sequence[Call]) -> float:
        started_s = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started_s) * 1e6 / len(calls)

    def captured(self, call: Call) -> Call:
        return call

    def synchronize(self) -> None:
        """Do nothing: what was called is done."""

    def long_work(self) -> Mark:
        return _Never()

    def memory(self) -> GpuMemory:
        self.empty()
        return GpuMemory(DRY_BYTES, DRY_BYTES, 0)

    def peak_bytes(self) -> int:
        return 0

    def forget_peak(self) -> None:
        """Do nothing: no peak is kept."""

    def limit_share(self, share: float) -> None:
        """Do nothing: the memory is the machine's."""

    def facts(self) -> dict[str, str]:
        return {"gpu": "none: a dry run", "torch": torch.__version__, "triton": triton.__version__}

    def clocks(self) -> str:
        return "none: a dry run"


class _Never:
    def query(self) -> bool:
        return False


def device_of(*, is_dry: bool, is_thorough: bool = False) -> Device:
    return Interpreter(is_thorough=is_thorough) if is_dry else Gpu(is_thorough=is_thorough)
