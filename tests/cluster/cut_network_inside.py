"""A real cluster whose lanes are cut by packet filters. Run in a network namespace by test_cut_network.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import all_ready, greedy, is_idle, load_of
from model_zoo import first_disagreement
from moments import FAT_KV, PROMPT_PAGES, ROUTER_FLAGS, WORKER_FLAGS, Scene, during
from network_namespace import DROP, RESET, cut, lane_ports, raise_loopback
from transformers import PreTrainedModel
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin

pytestmark = pytest.mark.timeout(250)
POOLS = Pools(("prefill-0",), ("decode-0", "decode-1"))
MODEL_SHAPE = FAT_KV


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    raise_loopback()
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, POOLS, WORKER_FLAGS, ROUTER_FLAGS) as cluster:
        yield cluster


@pytest.fixture
def scene(cluster: WiredCluster, request: pytest.FixtureRequest) -> Iterator[Scene]:
    cluster.wait_for(is_well, 30)
    cluster.introduce()
    cluster.wait_for(is_well, 5)
    scene = Scene.of(cluster, request.node.name)
    try:
        during(scene)
        yield scene
    finally:
        scene.let_go()
    cluster.wait_for(is_well, 60)


def is_well(status: admin.ClusterStatus) -> bool:
    return all_ready(3)(status) and is_idle(status)


def is_heard(status: admin.ClusterStatus, name: str) -> bool:
    return any(w.registration.worker_id == name and w.silent_ms < 300 for w in status.workers)


def lanes(scene: Scene) -> set[int]:
    """Return the ports at which the decode worker's pages are written."""
    name = scene.servers["decode"]
    target = scene.cluster.proxies[f"handoff {name}"].target
    assert target is not None
    ports = lane_ports(scene.cluster.pid_of(name), {target[1]})
    assert ports
    return ports


def test_a_blackholed_lane_holds_a_transfer_up_and_costs_nothing_else(scene: Scene, oracle: PreTrainedModel) -> None:
    decode = scene.servers["decode"]
    with cut(lanes(scene), DROP):
        scene.let_go()
        scene.cluster.wait_for(
            lambda s: any(w.registration.worker_id == decode and w.silent_ms < 300 for w in s.workers), 5
        )
        assert load_of(scene.cluster.status(), decode).pages_granted == PROMPT_PAGES
    scene.assert_right(oracle)
    assert scene.answer.ledger.attempts == 1


def test_pages_that_a_reset_lane_may_still_reach_come_back_with_the_writers_process_alone(
    scene: Scene, oracle: PreTrainedModel
) -> None:
    decode, prefill, cluster = scene.servers["decode"], scene.servers["prefill"], scene.cluster

    def kept(status: admin.ClusterStatus) -> bool:
        return all_ready(3)(status) and load_of(status, decode).pages_quarantined == PROMPT_PAGES

    with cut(lanes(scene), RESET):
        scene.assert_right(oracle)  # the writer heard of an error, and another decode worker serves
    assert scene.answer.ledger.attempts == 2
    scene.let_go()
    cluster.wait_for(lambda s: kept(s) and load_of(s, prefill).num_handoffs == 0, 10)
    asked = [[seed, *scene.asked[:100]] for seed in range(3, 9)]
    for each, answer in zip(asked, cluster.generate_all([greedy(each, 50) for each in asked]), strict=True):
        assert first_disagreement(oracle, each, answer.tokens[0]) is None
    assert kept(cluster.status())
    cluster.kill(prefill)
    cluster.report_gone(prefill)
    cluster.wiring.start_again(prefill)
