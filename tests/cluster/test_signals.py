"""SIGKILL and SIGSTOP of each role, before, during and after a transfer: no token is lost or doubled, no page kept."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from live_cluster import all_ready, is_idle
from moments import FAT_KV, MOMENTS, ROUTER_FLAGS, WORKER_FLAGS, Scene
from transformers import PreTrainedModel
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin

POOLS = Pools(("prefill-0", "prefill-1"), ("decode-0", "decode-1"))
GIVEN_UP_WITHIN_S = 15
ALWAYS = ("during",)
MODEL_SHAPE = FAT_KV


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, POOLS, WORKER_FLAGS, ROUTER_FLAGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: WiredCluster) -> Iterator[WiredCluster]:
    shared.wait_for(is_well, 60)
    shared.introduce()
    shared.wait_for(is_well, 5)
    yield shared
    shared.wait_for(is_well, 60)


def is_well(status: admin.ClusterStatus) -> bool:
    return all_ready(4)(status) and is_idle(status)


@pytest.fixture(params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in MOMENTS])
def moment(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def scene(cluster: WiredCluster, moment: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene.of(cluster, request.node.name)
    try:
        MOMENTS[moment](scene)
        yield scene
    finally:
        scene.let_go()


def attempts_needed(role: str, moment: str) -> int:
    """A stream outlives the prefill worker that has handed it off."""
    return 1 if (role, moment) == ("prefill", "after") else 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_no_token(scene: Scene, oracle: PreTrainedModel, role: str, moment: str) -> None:
    victim = scene.servers[role]
    scene.cluster.kill(victim)
    scene.let_go()
    scene.cluster.report_gone(victim)
    scene.cluster.wiring.start_again(victim)
    scene.assert_right(oracle)
    assert scene.answer.ledger.attempts == attempts_needed(role, moment)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.long), "decode"])
def test_a_worker_frozen_until_it_is_given_up_costs_no_token_and_is_well_again_when_it_thaws(
    scene: Scene, oracle: PreTrainedModel, role: str, moment: str
) -> None:
    victim = scene.servers[role]
    if victim not in scene.frozen:
        scene.freeze(victim)
    scene.let_go(but=victim)
    scene.assert_right(oracle)
    scene.cluster.wait_for(lambda s: victim not in {w.registration.worker_id for w in s.workers}, GIVEN_UP_WITHIN_S)
    assert scene.answer.ledger.attempts == attempts_needed(role, moment)


def test_a_router_that_was_frozen_goes_on_where_it_was(scene: Scene, oracle: PreTrainedModel) -> None:
    with scene.cluster.frozen("router"):
        scene.let_go()
        with pytest.raises(grpc.RpcError) as unanswered:
            scene.cluster.status(timeout_s=0.5)
        assert unanswered.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    scene.assert_right(oracle)
    assert scene.answer.ledger.attempts == 1


def test_a_killed_router_ends_its_streams_and_its_workers_free_their_pages(
    scene: Scene, oracle: PreTrainedModel
) -> None:
    scene.cluster.kill("router")
    scene.let_go()
    with pytest.raises(grpc.RpcError) as ended:
        scene.assert_right(oracle)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    scene.cluster.wiring.start_again("router")
    scene.cluster.wait_for(is_well, 30)
    again = Scene(scene.cluster, scene.asked)
    again.begin()
    again.assert_right(oracle)
