"""Finds a cluster's capacity: the number of requests in flight is raised until throughput does not rise with it.

Only right answers count: those that end well and have every token that was asked for.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from pdserve.errors import CommandError
from pdserve.measure.client import Client, new_tenant, request_of
from pdserve.measure.outcomes import ANY, OK
from pdserve.measure.workload import Arrival
from pdserve.proto.v1 import inference_pb2 as inference

FIRST_IN_FLIGHT, MOST_IN_FLIGHT = 24, 3072  # requests that run or wait at a time
_GAIN = 1.1  # what twice as many in flight have to bring
_FILLING = 1 / 4  # of the time: batches fill up
_RAMP_SHARE = 1 / 2  # of the time of the measurement: a step before it
_PAUSE_S = 0.1  # after a failure, unless the router names another time
_MOST_PAUSE_S = 1.0


class NothingServedError(CommandError):
    """Not one request was answered right; names what came instead."""


class Ramp:
    """How many requests to keep in flight: doubled while that brings a tenth more answers."""

    def __init__(self) -> None:
        self.num_in_flight = FIRST_IN_FLIGHT
        self._best = 0.0

    def grow(self, answers_per_s: float) -> bool:
        """Take in what the present number brings; return whether it is doubled."""
        if answers_per_s < _GAIN * self._best or self.num_in_flight >= MOST_IN_FLIGHT:
            return False
        self._best = answers_per_s
        self.num_in_flight *= 2
        return True


class Clients:
    """Clients that each send a request when their last one has ended, in turn and over and over."""

    def __init__(self, client: Client, requests: Iterator[inference.GenerateRequest]) -> None:
        self._client = client
        self._requests = requests
        self._num_clients = 0
        self._is_over = False
        self.num_right = 0
        self.others: Counter[str] = Counter()  # what else came, by status

    def enlarge(self, tasks: asyncio.TaskGroup, num_clients: int) -> None:
        for _ in range(num_clients - self._num_clients):
            tasks.create_task(self._keep_asking())
        self._num_clients = num_clients

    async def answers_per_s(self, seconds: float) -> float:
        """Return how many right answers end a second, once batches have filled up."""
        await asyncio.sleep(_FILLING * seconds)
        begin, began_s = self.num_right, self._client.clock.now_s()
        await asyncio.sleep((1 - _FILLING) * seconds)
        return (self.num_right - begin) / (self._client.clock.now_s() - began_s)

    def end(self) -> None:
        self._is_over = True

    async def _keep_asking(self) -> None:
        while not self._is_over:
            outcome = await self._client.send(next(self._requests))
            if outcome.status == OK and outcome.num_tokens == outcome.output_tokens:
                self.num_right += 1
                continue
            self.others[outcome.status if outcome.status != OK else "an answer of a wrong length"] += 1
            await asyncio.sleep(min(_MOST_PAUSE_S, outcome.retry_after_s or _PAUSE_S))


async def saturate(
    client: Client, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], seconds: float
) -> float:
    """Return how many right answers a second the cluster gives at most, measured for `seconds`.

    Before, each number of requests in flight is tried for half as long. Few requests would measure badly: lengths
    differ, and so does what each costs. NothingServedError if no answer is right.
    """
    clients, ramp = Clients(client, _endless(arrivals, prompts)), Ramp()
    async with asyncio.TaskGroup() as tasks:
        clients.enlarge(tasks, ramp.num_in_flight)
        while ramp.grow(await clients.answers_per_s(_RAMP_SHARE * seconds)) and clients.num_right:
            clients.enlarge(tasks, ramp.num_in_flight)
        is_refused = not clients.num_right and clients.others  # else the first answers are still to come
        found = 0.0 if is_refused else await clients.answers_per_s(seconds)
        clients.end()
    if not found:
        came = ", ".join(f"{count} x {status}" for status, count in clients.others.most_common()) or "nothing"
        raise NothingServedError(f"no request was answered in full while the cluster was kept full; what came: {came}")
    return found


def _endless(arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]) -> Iterator[inference.GenerateRequest]:
    """Yield the requests again and again, each time of another tenant: none finds its prompt cached."""
    while True:
        tenant = new_tenant()
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            yield request_of(arrival, prompt, tenant, ANY)
