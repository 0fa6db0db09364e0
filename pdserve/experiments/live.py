"""A cluster that is started for an experiment, and a client of it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdserve.bench.client import LoadClient, connect
from pdserve.bench.saturation import saturate
from pdserve.bench.summary import Sample, Slo
from pdserve.bench.workload import Arrival, prompts
from pdserve.clock import MonotonicClock
from pdserve.launch.admin import AdminClient
from pdserve.launch.local import Listener, running
from pdserve.launch.plan import ClusterSpec
from pdserve.launch.state import ClusterState
from pdserve.proto.v1 import admin_pb2 as admin

Tell = Callable[[str], None]  # what is going on, for a person who waits
ANY = Slo()


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """A running cluster and a connection to it."""

    state: ClusterState
    client: LoadClient
    vocab_size: int

    async def run(self, arrivals: Sequence[Arrival], slo: Slo = ANY, seed: int = 0) -> list[Sample]:
        """Send requests at their times; return what came of each."""
        return await self.client.run(arrivals, prompts(arrivals, self.vocab_size, seed), _nothing, slo)

    async def capacity(self, arrivals: Sequence[Arrival], seconds: float, seed: int = 0) -> float:
        """Return how many requests a second end while there are always some that wait."""
        token_ids = prompts(arrivals, self.vocab_size, seed)
        return await saturate(self.client, arrivals, token_ids, seconds)

    async def status(self) -> admin.ClusterStatus:
        """Return the router's view of the cluster."""
        async with AdminClient(self.state.admin, self.state.secret_file) as operator:
            return await operator.status()


@asynccontextmanager
async def live_cluster(spec: ClusterSpec, tell: Tell) -> AsyncIterator[LiveCluster]:
    """Run a cluster for the length of the block."""
    tell(f"starting {spec.num_prefill} prefill and {spec.num_decode} decode workers of {spec.served_model_name}")
    async with running(spec, Listener(on_status=_nothing, on_notice=tell)) as cluster:
        await cluster.ready.wait()
        async with connected(cluster.state) as live:
            yield live


@asynccontextmanager
async def connected(state: ClusterState) -> AsyncIterator[LiveCluster]:
    """Be a client of a cluster that runs already."""
    async with connect(state.endpoint) as channel:
        client = LoadClient(channel, MonotonicClock(), ANY)
        yield LiveCluster(state, client, await client.vocab_size())


def _nothing(*_: object) -> None:
    pass
