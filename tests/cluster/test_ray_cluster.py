"""`pdserve up --on ray`: the router here, its workers owned by actors of a real Ray, of which one is killed."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live_cluster import LiveCluster, greedy, live_cluster
from ray_nodes import RayNodes, ray_head

from pdserve.proto.v1 import admin_pb2 as admin

pytestmark = pytest.mark.long
PROMPT = range(10, 60)


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_head(num_cpus=2) as nodes:
        yield nodes


def workers_of(nodes: RayNodes) -> dict[str, psutil.Process]:
    """Return the processes of workers, by the worker's id."""
    commands = {process: process.cmdline() for process in nodes.all_processes()}
    return {
        command[command.index("--worker-id") + 1]: process
        for process, command in commands.items()
        if "--worker-id" in command
    }


def num_ranks_beside(nodes: RayNodes) -> int:
    """Return how many processes of ranks there are beside those of workers."""
    return sum("pdserve.executor.rank" in process.cmdline() for process in nodes.all_processes())


def incarnations(cluster: LiveCluster) -> dict[str, int]:
    return {each.registration.worker_id: each.registration.incarnation for each in cluster.status().workers}


@pytest.mark.parametrize("ranks", [(), ("--tensor-parallel-size", "2", "--rank-memory", "own", "--dtype", "float32")])
def test_a_killed_actor_comes_back_with_its_worker_and_the_end_leaves_nothing(
    nodes: RayNodes, model: Path, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    flags = ("--on", "ray", "--address", nodes.address, "--num-pages", "64", *ranks)
    with live_cluster(tmp_path, model, *flags) as cluster:
        answer = cluster.generate(greedy(PROMPT, 8)).tokens
        before, workers = incarnations(cluster), workers_of(nodes)
        assert before.keys() == workers.keys() == {"prefill-0", "decode-0"}
        assert num_ranks_beside(nodes) == (2 if ranks else 0)
        actor = workers["decode-0"].parent()
        assert actor is not None
        actor.kill()

        def is_back(status: admin.ClusterStatus) -> bool:
            ready = {each.registration.worker_id: each.registration for each in status.workers}
            found = ready.get("decode-0")
            return found is not None and found.ready and found.incarnation > before["decode-0"]

        cluster.wait_for(is_back, timeout_s=60)
        assert incarnations(cluster)["prefill-0"] == before["prefill-0"]
        assert cluster.generate(greedy(PROMPT, 8)).tokens == answer
    assert not workers_of(nodes)
    assert not num_ranks_beside(nodes)
