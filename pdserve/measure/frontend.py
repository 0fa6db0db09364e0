"""What a streamed request costs a router's processes: a real router, replayed workers, and streams from this process.

The router's CPU time is what the kernel charges its processes. Streams are closed loops: each sends its next request
when the last has ended, and has a connection of its own.
"""

import asyncio
import json
import multiprocessing
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Protocol

import grpc
import psutil

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.launch.folder import free_port
from pdserve.measure.client import Door
from pdserve.measure.live import Report, serving_process
from pdserve.measure.outcomes import Percentiles, percentiles
from pdserve.measure.replayed import replay
from pdserve.net.rpc import split_address
from pdserve.proto.v1 import inference_pb2 as inference

_HOST = "127.0.0.1"
_MODEL = "replayed"
_ANSWER = (
    "The harbour lay quiet under a pale sky while gulls wheeled over the fishing boats, and the old lighthouse keeper "
    "counted the ships that had come home before the storm; there were seventeen, he said, and one that had not. "
)
_WORDS = _ANSWER.replace(",", "").replace(";", "").replace(".", "").lower().split()
_READY_TIMEOUT_S = 60.0
PROMPT_WORDS = 200
_POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_GENERATE = "/pdserve.v1.InferenceService/Generate"


_CPUCLOCK_SCHED = 2
Limit = Callable[[Sequence[int], int], AbstractContextManager[None]]  # of a router's processes, with so many frontends


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `num_streams` closed loops of `rounds` requests each, after one that does not count."""

    door: Door
    step_s: float
    num_streams: int
    output_tokens: int
    rounds: int
    num_frontends: int = 0  # processes beside the router; 0: it serves clients itself

    def __str__(self) -> str:
        streams = f"{self.num_streams} x {self.output_tokens} tokens"
        return f"{self.door}, {1e3 * self.step_s:g} ms, {streams}, frontends: {self.num_frontends}"


@dataclass(frozen=True, slots=True)
class Answered:
    """What a stream saw of one request."""

    ttft_s: float
    num_messages: int


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


class Stream(Protocol):
    """One connection that sends a request after another."""

    async def ask(self, prompt: str, max_tokens: int) -> Answered:
        """Send a request and read its answer whole; CommandError where it is not as long as it should be."""

    async def close(self) -> None: ...


class GrpcStream:
    """A client of InferenceService that parses the last message of an answer alone."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_GENERATE)
        self._clock = MonotonicClock()

    async def ask(self, prompt: str, max_tokens: int) -> Answered:
        sampling = inference.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = inference.GenerateRequest(text=prompt, sampling=sampling)
        sent_s, first_s, num_messages, last = self._clock.now_s(), 0.0, 0, b""
        call = self._generate(request.SerializeToString())
        while isinstance(message := await call.read(), bytes):
            first_s = first_s or self._clock.now_s()
            num_messages, last = num_messages + 1, message
        num_tokens = inference.GenerateResponse.FromString(last).usage.completion_tokens
        if num_tokens != max_tokens:
            raise CommandError(f"an answer has {num_tokens} tokens, {max_tokens} were asked for")
        return Answered(first_s - sent_s, num_messages)

    async def close(self) -> None:
        await self._channel.close()


class HttpStream(asyncio.Protocol):
    """A client of /v1/completions that looks at an answer's events no further than to count them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._clock = MonotonicClock()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._first_s = 0.0
        self._whole: asyncio.Future[None] | None = None

    async def ask(self, prompt: str, max_tokens: int) -> Answered:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            host, port = split_address(self._address)
            self._transport, _ = await loop.create_connection(lambda: self, host, int(port))
        if self._transport.is_closing():
            raise CommandError("the router closed a connection between two requests")
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        packed = json.dumps(body).encode()
        self._received.clear()
        self._whole = loop.create_future()
        sent_s = self._clock.now_s()
        self._transport.write(_POST % (len(packed), packed))
        await self._whole
        if b'"completion_tokens":%d,' % max_tokens not in self._received:
            raise CommandError(f"an answer is not of {max_tokens} tokens: {bytes(self._received[-1000:])!r}")
        return Answered(self._first_s - sent_s, self._received.count(b"data: ") - 1)  # besides [DONE]

    def data_received(self, data: bytes) -> None:
        if b"data: " not in self._received:
            self._first_s = self._clock.now_s()
        self._received += data
        is_error = self._received.startswith(b"HTTP/1.1") and not self._received.startswith(b"HTTP/1.1 200")
        if self._whole is not None and (is_error or self._received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")):
            self._whole.set_result(None)
            self._whole = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._whole is not None:
            self._whole.set_exception(exc or CommandError("the router closed a connection"))

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, with that of threads which have ended, to the nanosecond.

    /proc/PID/stat, which psutil reads, has hundredths of a second. The clock's number is what clock_getcpuclockid(3)
    returns, which Python lacks.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class _Router:
    """A running router and its doors' addresses."""

    processes: Sequence[psutil.Process]  # its own, and its frontends'
    doors: Mapping[Door, str]

    def cpu_s(self) -> Counter[int]:
        """Return the CPU time of the router's processes so far, by their ids."""
        return Counter({each.pid: cpu_s(each.pid) for each in self.processes})

    def stream(self, door: Door) -> Stream:
        return (GrpcStream if door is Door.GRPC else HttpStream)(self.doors[door])


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
                doors = {Door.GRPC: f"{_HOST}:{public}", Door.HTTP: f"{_HOST}:{http}"}
                await _ready(doors[Door.GRPC])
                yield _Router([psutil.Process(process.pid) for process in processes], doors)
            finally:
                worker.terminate()
                worker.join()


async def _ready(address: str) -> None:
    """Return once the router answers a request; it waits for workers by itself."""
    async with asyncio.timeout(_READY_TIMEOUT_S), grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
    stream = GrpcStream(address)
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
