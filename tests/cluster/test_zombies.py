"""Real processes that should have ended: a router sends them away, they end and say why; who followed them serves."""

import signal
import subprocess
from collections.abc import Iterator

import pytest
from live_cluster import all_ready, greedy
from model_zoo import write_model
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.worker.watchdog import DISMISSED_EXIT_STATUS

NAME = "prefill-0"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    model = write_model("llama3", tmp_path_factory.mktemp("model") / "llama3")
    flags = {"dtype": "float32", "num_pages": 400}
    pools = Pools((NAME,), ("decode-0",))
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, pools, flags) as cluster:
        yield cluster


def assert_serves(cluster: WiredCluster) -> None:
    answer = cluster.generate(greedy([3, *range(5, 60)], 5))
    assert (len(answer.tokens[0]), answer.ledger.attempts) == (5, 1)


def test_a_process_that_thaws_when_it_has_a_successor_ends_though_the_router_knows_neither(
    cluster: WiredCluster,
) -> None:
    zombie, _ = cluster.wiring.started[NAME]
    zombie.send_signal(signal.SIGSTOP)
    try:
        cluster.wiring.start_again(NAME, handoff_port=0)  # the frozen one still listens on its own
        cluster.kill("router")
        cluster.wiring.start_router()
        cluster.wait_for(all_ready(2), 60)
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(30) == DISMISSED_EXIT_STATUS
    except BaseException:
        _end(zombie)
        raise
    assert "a later process of its name has attached" in cluster.wiring.log_of(NAME)
    status = cluster.status()
    assert dict(status.refused) == {"incarnation": 1}
    assert all_ready(2)(status)
    assert_serves(cluster)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
