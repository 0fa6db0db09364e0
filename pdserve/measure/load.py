"""Sends workloads to a cluster that runs, one after the other."""

from collections.abc import Sequence

from rich.console import Console

from pdserve.clock import MonotonicClock
from pdserve.measure.client import Client, connect, requests_of
from pdserve.measure.objectives import Objective
from pdserve.measure.summary import Summary, summarize
from pdserve.measure.tables import counted
from pdserve.measure.workload import Workload, random_prompts


async def measure_load(
    endpoint: str, workloads: Sequence[Workload], objective: Objective, seed: int, max_concurrency: int | None
) -> list[Summary]:
    """Return what each workload's clients saw."""
    summaries = []
    async with connect(endpoint) as channel:
        client = Client(channel, MonotonicClock())
        vocab_size = await client.vocab_size()
        for each in workloads:
            prompts = random_prompts(each.arrivals, vocab_size, seed)
            requests = requests_of(each.arrivals, prompts, objective)
            with counted(Console(stderr=True), each.name, len(requests)) as advance:
                outcomes = await client.run(requests, lambda _: advance(), max_concurrency)
            summaries.append(summarize(each.name, outcomes, objective))
    return summaries
