"""Find out how many requests a cluster can serve: keep it full for a while."""

import asyncio
from collections.abc import Iterator, Sequence

from pdserve.bench.client import LoadClient
from pdserve.bench.workload import Arrival

CONCURRENCY = 24  # requests that run or wait at a time
_FILLING = 1 / 4  # of the time: batches fill up


async def saturate(
    client: LoadClient, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]], seconds: float
) -> float:
    """Send requests as others end, again and again from the first; return how many ended well a second.

    Counted once batches have filled up. Few requests tell little: lengths differ, and so does what each costs.
    """
    ended_s: list[float] = []
    tenant = client.new_tenant()
    turns = _endless(len(arrivals))
    began_s = client.clock.now_s()

    async def keep_asking() -> None:
        for number, turn in turns:
            sample = await client.ask(arrivals[number], prompts[number], f"{tenant}-{turn}")
            if sample.status == "OK":
                ended_s.append(client.clock.now_s() - began_s)
            if client.clock.now_s() - began_s > seconds:
                return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(keep_asking())
    num_ended = sum(_FILLING * seconds < end_s <= seconds for end_s in ended_s)
    return max(1, num_ended) / ((1 - _FILLING) * seconds)


def _endless(count: int) -> Iterator[tuple[int, int]]:
    """Yield 0 to count-1 again and again, with the number of the round."""
    turn = 0
    while True:
        yield from ((number, turn) for number in range(count))
        turn += 1
