"""Clusters that are started for a measurement, or run already, and a connection to each."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdserve.base.clock import MonotonicClock
from pdserve.launch.folder import ClusterState
from pdserve.launch.local import Listener, running
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.client import Access, Client, connect, requests_of
from pdserve.measure.outcomes import ANY, Objective, Outcome
from pdserve.measure.workload import Arrival, random_prompts
from pdserve.proto.v1 import admin_pb2 as admin

Report = Callable[[str], None]  # prints progress for a person who waits


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """A running cluster and a connection to it."""

    state: ClusterState
    client: Client
    vocab_size: int

    async def run(
        self,
        arrivals: Sequence[Arrival],
        objective: Objective = ANY,
        seed: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Send requests at their times; return what came of each. `advance` is called when one has ended."""
        prompts = random_prompts(arrivals, self.vocab_size, seed)
        return await self.client.run(requests_of(arrivals, prompts, objective), lambda _: advance())

    async def status(self) -> admin.ClusterStatus:
        """Return the router's view of the cluster."""
        return await self.state.operator().status()


@asynccontextmanager
async def live_cluster(spec: ClusterSpec, report: Report) -> AsyncIterator[LiveCluster]:
    """Run a cluster for the length of the block, and report its start."""
    report(f"starting {spec.num_prefill} prefill and {spec.num_decode} decode workers of {spec.served_model_name}")
    async with running(spec, Listener(on_status=lambda _: None, on_notice=report)) as cluster:
        await cluster.ready.wait()
        async with connected(cluster.state) as live:
            yield live


@asynccontextmanager
async def connected(state: ClusterState) -> AsyncIterator[LiveCluster]:
    """Be a client of a cluster that runs already."""
    async with connect(state.endpoint, Access(state.ca_file) if state.ca_file else None) as channel:
        client = Client(channel, MonotonicClock())
        yield LiveCluster(state, client, await client.vocab_size())
