"""Workloads sent to a running cluster, through one of its doors or through both in turn."""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from pdserve.base.clock import MonotonicClock
from pdserve.measure import http_client
from pdserve.measure.client import GREEDY, Access, Client, Door, OpenLoop, Sampling, Timed, connect, requests_of
from pdserve.measure.outcomes import Objective, Outcome, Summary, percentiles, summarize
from pdserve.measure.tables import counted
from pdserve.measure.workload import Workload, random_prompts

Reached = tuple[str, Access | None]  # address of a door (of HTTP its URL) and credentials


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and how often."""

    workloads: Sequence[tuple[Workload, float | None]]  # each at its rate, or at its own times
    objective: Objective
    seed: int  # of prompts and moments
    max_concurrency: int | None = None
    sampling: Sampling = GREEDY
    rounds: int = 1


@dataclass(slots=True)
class Run:
    """A workload at one rate through one door, and what came of it."""

    workload: str
    rate_per_s: float | None  # None: at the workload's own times
    name: str
    door: Door
    objective: Objective
    rounds: list[list[Outcome]] = field(default_factory=list)
    client_cpu_s: float = 0.0  # of the process that sends, and reads answers

    @property
    def outcomes(self) -> list[Outcome]:
        return list(chain.from_iterable(self.rounds))

    @property
    def summary(self) -> Summary:
        """What all rounds come to, one after another."""
        seconds = sum(max(o.ended_s for o in each) - min(o.sent_s for o in each) for each in self.rounds)
        return summarize(self.name, self.outcomes, self.objective, seconds)

    @property
    def cpu_s_per_token(self) -> float:
        return self.client_cpu_s / max(1, sum(each.num_tokens for each in self.outcomes))


async def measure_load(doors: Mapping[Door, Reached], load: Load) -> list[Run]:
    """Return what clients saw of each workload at its rate, through each door. Doors take turns, forth and back."""
    runs: list[Run] = []
    has_rates = len({rate for _, rate in load.workloads}) > 1
    async with AsyncExitStack() as stack:
        clients = {door: await stack.enter_async_context(_client(door, reached)) for door, reached in doors.items()}
        vocab_size = await next(iter(clients.values())).vocab_size()
        for workload, rate in load.workloads:
            name = f"{workload.name}, {rate:g}/s" if has_rates else workload.name
            through = [
                Run(workload.name, rate, f"{name}, {door}" if len(doors) > 1 else name, door, load.objective)
                for door in doors
            ]
            arrivals = workload.sent_at(rate, load.seed).arrivals
            prompts = random_prompts(arrivals, vocab_size, load.seed)
            for number in range(load.rounds):
                for run in through if number % 2 == 0 else reversed(through):
                    requests = requests_of(arrivals, prompts, load.objective, load.sampling)  # a tenant of their own
                    await _send(clients[run.door], requests, run, load.max_concurrency)
            runs += through
    return runs


async def _send(client: OpenLoop, requests: Sequence[Timed], run: Run, max_concurrency: int | None) -> None:
    """Send the requests of one round."""
    began_s = time.process_time()
    with counted(run.name, len(requests)) as advance:
        run.rounds.append(await client.run(requests, lambda _: advance(), max_concurrency))
    run.client_cpu_s += time.process_time() - began_s


@asynccontextmanager
async def _client(door: Door, reached: Reached) -> AsyncIterator[OpenLoop]:
    if door is Door.HTTP:
        async with http_client.connected(*reached) as client:
            yield client
    else:
        async with grpc_client(*reached) as grpc:
            yield grpc


@asynccontextmanager
async def grpc_client(endpoint: str, access: Access | None) -> AsyncIterator[Client]:
    """Be a client of a router's gRPC port for the length of the block."""
    async with connect(endpoint, access) as channel:
        yield Client(channel, MonotonicClock())


def door_notes(runs: Iterable[Run]) -> list[str]:
    """Return, for each workload that went through both doors, what HTTP adds to the time to the first token.

    What is left without the router's own timeline is of the doors and the clients, whatever queues and workers did.
    """
    kept = {(run.workload, run.rate_per_s, run.door): run for run in runs}
    notes = []
    for (workload, rate, door), http in kept.items():
        grpc = kept.get((workload, rate, Door.GRPC))
        if door is not Door.HTTP or grpc is None:
            continue
        whole, outside = _added(http, grpc, lambda each: each.ttft_s), _added(http, grpc, _outside_s)
        cpu = f"{1e6 * http.cpu_s_per_token:.0f} and {1e6 * grpc.cpu_s_per_token:.0f} us"
        notes.append(f"{workload}: HTTP adds to gRPC's TTFT p50 {whole}, outside the router's timeline {outside}")
        notes.append(f"{workload}: CPU of this client a token, HTTP and gRPC: {cpu}")
    return notes


def _added(http: Run, grpc: Run, time_of: Callable[[Outcome], float | None]) -> str:
    """Return the difference of the medians: its median over the rounds, and that of each round."""
    pairs = [
        (_p50_ms(one, time_of), _p50_ms(other, time_of)) for one, other in zip(http.rounds, grpc.rounds, strict=True)
    ]
    added = [one - other for one, other in pairs if one is not None and other is not None]
    return f"{median(added):+.2f} ms ({', '.join(f'{each:+.2f}' for each in added)})" if added else "-"


def _outside_s(outcome: Outcome) -> float | None:
    at_s = outcome.stages_s.get("first_token")
    return None if at_s is None or outcome.ttft_s is None else outcome.ttft_s - at_s


def _p50_ms(outcomes: Iterable[Outcome], time_of: Callable[[Outcome], float | None]) -> float | None:
    seen = percentiles(time_of(each) for each in outcomes if each.is_good)
    return None if seen is None else 1e3 * seen.p50
