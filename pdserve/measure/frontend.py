"""What a streamed request costs a router's processes: a real router, replayed workers, and streams from this process.

The router's CPU time is what the kernel charges its processes. Streams are closed loops: each sends its next request
when the last has ended, and has a connection of its own.
"""

import asyncio
import multiprocessing
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from pdserve.base.clock import MonotonicClock
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.launch.folder import free_port
from pdserve.measure.live import Report, serving_process
from pdserve.measure.outcomes import Percentiles, percentiles
from pdserve.measure.replayed import replay
from pdserve.measure.streams import Answered, Api, Stream, open_stream

_HOST = "127.0.0.1"
_MODEL = "replayed"
_ANSWER = (
    "The harbour lay quiet under a pale sky while gulls wheeled over the fishing boats, and the old lighthouse keeper "
    "counted the ships that had come home before the storm; there were seventeen, he said, and one that had not. "
)
_WORDS = _ANSWER.replace(",", "").replace(";", "").replace(".", "").lower().split()
_READY_TIMEOUT_S = 60.0
PROMPT_WORDS = 200
_CPUCLOCK_SCHED = 2
Limit = Callable[[Sequence[int], int], AbstractContextManager[None]]  # of a router's processes, with so many frontends


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `num_streams` closed loops of `rounds` requests each, after one that does not count."""

    door: Api
    step_s: float
    num_streams: int
    output_tokens: int
    rounds: int
    num_frontends: int = 0  # processes beside the router; 0: it serves clients itself

    def __str__(self) -> str:
        streams = f"{self.num_streams} x {self.output_tokens} tokens"
        return f"{self.door}, {1e3 * self.step_s:g} ms, {streams}, frontends: {self.num_frontends}"


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of a load."""

    spent_s: Counter[int]  # CPU time of the router's processes, by their ids
    lasted_s: float
    answers: Sequence[Answered]

    def of_each(self, total: float) -> float:
        return total / len(self.answers)


@dataclass(frozen=True, slots=True)
class FrontendCost:
    """What a load took: medians of its runs."""

    name: str
    load: Load
    cpu_a_request_s: dict[str, float]  # of the router's processes: the median, least and most of all runs
    busiest_a_request_s: float  # CPU time of the router's busiest process
    messages_a_request: float
    requests_per_s: float
    ttft_s: Percentiles | None  # of the requests of all runs


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, with that of threads which have ended, to the nanosecond.

    /proc/PID/stat, which psutil reads, has hundredths of a second. The clock's number is what clock_getcpuclockid(3)
    returns, which Python lacks.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class _Router:
    """A running router and its addresses."""

    processes: Sequence[psutil.Process]  # its own, and its frontends'
    grpc_address: str
    http_address: str

    def cpu_s(self) -> Counter[int]:
        """Return the CPU time of the router's processes so far, by their ids."""
        return Counter({each.pid: cpu_s(each.pid) for each in self.processes})

    def stream(self, door: Api) -> Stream:
        return open_stream(door, _MODEL, self.grpc_address, self.http_address)


async def measure_frontend(
    model: str,
    loads: Sequence[Load],
    repeats: int,
    report: Report,
    limited: Limit | None = None,
) -> list[FrontendCost]:
    """Measure loads in turn, so many times each; return the medians. `model` is read for its tokenizer.

    Each length of a step and number of frontends has a router of its own; `limited` holds its processes meanwhile.
    """
    found: dict[Load, list[Run]] = {load: [] for load in loads}
    for step_s in sorted({load.step_s for load in loads}, reverse=True):
        own = [load for load in loads if load.step_s == step_s]
        async with AsyncExitStack() as stack:
            routers = {}
            for count in sorted({load.num_frontends for load in own}):
                serving = _serving(model, step_s, count)
                router = routers[count] = await stack.enter_async_context(serving)
                if limited is not None:
                    stack.enter_context(limited([each.pid for each in router.processes], count))
            for load in own * repeats:
                text = f"{load.num_streams} streams, {load.output_tokens} tokens, {1e3 * step_s:g} ms"
                report(f"{load.door}, frontends: {load.num_frontends}: {text}")
                found[load].append(await _measure(routers[load.num_frontends], load))
    return [_cost(load, runs) for load, runs in found.items()]


def _cost(load: Load, runs: Sequence[Run]) -> FrontendCost:
    cpu_s = [run.of_each(run.spent_s.total()) for run in runs]
    return FrontendCost(
        str(load),
        load,
        cpu_a_request_s={"median": median(cpu_s), "least": min(cpu_s), "most": max(cpu_s)},
        busiest_a_request_s=median(run.of_each(max(run.spent_s.values())) for run in runs),
        messages_a_request=median(run.of_each(sum(each.num_messages for each in run.answers)) for run in runs),
        requests_per_s=median(len(run.answers) / run.lasted_s for run in runs),
        ttft_s=percentiles(each.ttft_s for run in runs for each in run.answers),
    )


@asynccontextmanager
async def _serving(model: str, step_s: float, num_frontends: int) -> AsyncIterator[_Router]:
    """Run a router and replayed workers for the length of the block."""
    path = resolve_model(model)
    answer = open_checkpoint(path).tokenizer().encode(_ANSWER, add_special=False)
    with TemporaryDirectory() as folder:
        secret_file = Path(folder) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))
        public, internal, http = (free_port(_HOST) for _ in range(3))
        common = {"model": path, "served_model_name": _MODEL, "secret_file": secret_file}
        ports = {"port": public, "http_port": http}
        flags = {**common, "internal_port": internal, "worker_silence_s": _READY_TIMEOUT_S}
        flags |= {"serve_clients": False} if num_frontends else ports
        of_frontends = {**common, **ports, "routers": (f"{_HOST}:{internal}",), "shares_ports": num_frontends > 1}
        worker = multiprocessing.get_context("spawn").Process(
            target=replay, args=(f"{_HOST}:{internal}", secret_file, _MODEL, answer, step_s, 1024), daemon=True
        )
        async with AsyncExitStack() as stack:
            started = [serving_process("router", flags)]
            started += [serving_process("frontend", of_frontends) for _ in range(num_frontends)]
            processes = [await stack.enter_async_context(each) for each in started]
            worker.start()
            try:
                found = [psutil.Process(process.pid) for process in processes]
                router = _Router(found, f"{_HOST}:{public}", f"{_HOST}:{http}")
                await _ready(router)
                yield router
            finally:
                worker.terminate()
                worker.join()


async def _ready(router: _Router) -> None:
    """Return once the router answers a request; it waits for workers by itself."""
    stream = router.stream(Api.GRPC)
    async with asyncio.timeout(_READY_TIMEOUT_S):
        await stream.ask("ready", 2)
    await stream.close()


async def _measure(router: _Router, load: Load) -> Run:
    clock, rng = MonotonicClock(), random.Random(load.num_streams)
    streams = [router.stream(load.door) for _ in range(load.num_streams)]
    try:
        await _rounds(streams, load, 1, rng)
        began_s, before_s = clock.now_s(), router.cpu_s()
        answers = await _rounds(streams, load, load.rounds, rng)
        return Run(router.cpu_s() - before_s, clock.now_s() - began_s, answers)
    finally:
        for stream in streams:
            await stream.close()


async def _rounds(streams: Sequence[Stream], load: Load, rounds: int, rng: random.Random) -> list[Answered]:
    async def run(stream: Stream) -> list[Answered]:
        prompts = (" ".join(rng.choices(_WORDS, k=PROMPT_WORDS)) for _ in range(rounds))
        return [await stream.ask(prompt, load.output_tokens) for prompt in prompts]

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(stream)) for stream in streams]
    return [answer for each in running for answer in each.result()]


def gains(found: Sequence[FrontendCost]) -> Iterator[str]:
    """Yield lines that compare each number of frontends with the fewest: what is served, and what could be."""
    by_load = {each.load: each for each in found}
    least = min((load.num_frontends for load in by_load), default=0)
    for load, each in by_load.items():
        base = by_load.get(replace(load, num_frontends=least))
        if base is None or base is each:
            continue
        served, could = each.requests_per_s / base.requests_per_s, base.busiest_a_request_s / each.busiest_a_request_s
        yield (
            f"{load}: {served:.2f} x the requests of frontends: {least}; "
            f"by the CPU time of the busiest process {could:.2f} x"
        )
