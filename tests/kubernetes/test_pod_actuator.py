"""Pods of deployments as an actuator, through a server's API."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from actuator_suite import ActuatorSuite
from kube_api import Fault, KubeApi
from kube_cluster import REAL, KubeCluster
from kube_stage import KubeStage, kube_stage

from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import State
from pdserve.base.roles import Role
from pdserve.kubernetes.objects import ACTUATOR, ROLE_LABEL

TEMPLATE = "pod-template-hash"


@pytest.fixture
async def stage(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[KubeStage]:
    async with kube_stage(kube, tmp_path) as stage:
        yield stage


class TestPodActuator(ActuatorSuite):
    pass


double_only = pytest.mark.skipif(bool(REAL), reason="a fault, or what the server saw")


async def ready(stage: KubeStage, *names: str) -> None:
    for name in names:
        await stage.actuator.add(name, Role(name.partition("-")[0]))
        await stage.make_ready(name)
    await stage.actuator.observe()


def double(stage: KubeStage) -> KubeApi:
    assert stage.kube.double is not None
    return stage.kube.double


async def replicas(stage: KubeStage) -> dict[str, State]:
    return {each.name: each.state for each in await stage.actuator.observe()}


async def test_exactly_the_pod_that_should_go_is_the_one_that_goes(stage: KubeStage) -> None:
    await ready(stage, "decode-1", "decode-2")
    pods = {name: await stage.pod(name) for name in ("decode-0", "decode-1", "decode-2")}
    await stage.actuator.drain("decode-1")
    await stage.until_gone("decode-1")
    left = {pod["metadata"]["name"] for pod in await stage.kube.pods()}
    assert left >= {pods["decode-0"], pods["decode-2"]}
    assert pods["decode-1"] not in left
    assert await stage.kube.size("chat-decode") == 2


async def test_a_ready_pod_is_not_drained_while_another_one_would_be_removed_in_its_place(stage: KubeStage) -> None:
    await ready(stage, "decode-1")
    await stage.actuator.add("decode-2", Role.DECODE)
    await stage.pod("decode-2")
    with pytest.raises(ActuatorError, match="not ready, and would be removed in its place"):
        await stage.actuator.drain("decode-0")
    assert await stage.kube.size("chat-decode") == 3
    await stage.actuator.drain("decode-2")  # which is not ready itself
    await stage.until_gone("decode-2")
    assert await replicas(stage) == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), State.READY)


async def test_of_pods_that_start_the_one_that_is_removed_first_is_the_one_that_was_meant(stage: KubeStage) -> None:
    await stage.actuator.add("decode-1", Role.DECODE)
    running = await stage.pod("decode-1")
    await stage.kube.set_status(running, ready=False)
    await stage.actuator.add("decode-2", Role.DECODE)
    await stage.pod("decode-2")
    await stage.actuator.drain("decode-1")  # it runs already, and the other one is removed
    await stage.until_gone("decode-1")
    assert await stage.pod("decode-2") == running


async def test_a_flipped_pod_counts_in_its_new_pool_and_leaves_by_the_deployment_that_made_it(stage: KubeStage) -> None:
    await ready(stage, "decode-1")
    pod = await stage.pod("decode-1")
    await stage.actuator.flip("decode-1", Role.PREFILL)
    held = {each.name: each.role for each in await stage.actuator.observe()}
    assert held == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.PREFILL}
    labels = {each["metadata"]["name"]: each["metadata"]["labels"] for each in await stage.kube.pods()}
    assert labels[pod][ROLE_LABEL] == "prefill"
    await stage.actuator.drain("decode-1")
    await stage.until_gone("decode-1")
    assert (await stage.kube.size("chat-prefill"), await stage.kube.size("chat-decode")) == (1, 1)


async def test_a_label_follows_a_role_that_somebody_else_gave(stage: KubeStage) -> None:
    pod = await stage.pod("decode-0")
    stage.router.roles[pod] = Role.PREFILL
    for _ in range(2):
        held = {each.name: each.role for each in await stage.actuator.observe()}
    assert held["decode-0"] is Role.PREFILL


async def test_an_autoscaler_that_was_started_again_goes_by_what_is_there(stage: KubeStage) -> None:
    await ready(stage, "decode-1")
    await stage.actuator.add("decode-2", Role.DECODE)
    stage.actuator = stage.another()
    states = Counter(each.state for each in await stage.actuator.observe() if each.role is Role.DECODE)
    assert states == {State.READY: 2, State.STARTING: 1}
    await stage.actuator.add("decode-7", Role.DECODE)
    assert await stage.kube.size("chat-decode") == 4


async def test_a_size_that_another_hand_has_changed_is_observed_before_it_is_changed_again(stage: KubeStage) -> None:
    path = stage.kube.path("deployments", "chat-decode", "apps")
    await stage.kube.patch(path, {"spec": {"replicas": 4}})
    with pytest.raises(ActuatorError, match="its size was set to 4, and 1 was observed"):
        await stage.actuator.add("decode-1", Role.DECODE)
    assert len(await stage.actuator.observe()) == 5
    await stage.actuator.add("decode-1", Role.DECODE)
    assert await stage.kube.size("chat-decode") == 5


@double_only
@pytest.mark.parametrize("num_lost", [1, 2])  # answers: a PUT on a connection that was there before is sent once more
async def test_an_order_whose_answer_is_lost_is_carried_out_once(stage: KubeStage, num_lost: int) -> None:
    for method, order in (("add", "decode-1"), ("add", "decode-2"), ("drain", "decode-0")):
        before = await stage.kube.size("chat-decode")
        lost = Fault("PUT", "/scale", lose="answer", times=num_lost)
        double(stage).faults.append(lost)
        call = stage.actuator.add(order, Role.DECODE) if method == "add" else stage.actuator.drain(order)
        with pytest.raises(ActuatorError, match=order) if num_lost == 2 else nullcontext():
            await call
        assert lost.times == 0
        for _ in range(2):
            if method == "add":
                await stage.actuator.add(order, Role.DECODE)
                await stage.make_ready(order)
            else:
                await stage.actuator.drain(order)
            assert await stage.kube.size("chat-decode") == before + (1 if method == "add" else -1)
            await stage.actuator.observe()


@double_only
@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", "/scale", status=409, times=2),
        Fault("PUT", "/scale", status=429, headers={"Retry-After": "0"}, times=2),
        Fault("GET", "/scale", status=500, times=1),
        Fault("GET", "/scale", status=503, headers={"Retry-After": "0"}, times=1),
    ],
    ids=lambda fault: f"{fault.method} {fault.status}",
)
async def test_conflicts_and_a_busy_api_delay_an_order_and_no_more(stage: KubeStage, fault: Fault) -> None:
    double(stage).faults.append(replace(fault))
    await stage.actuator.add("decode-1", Role.DECODE)
    assert await stage.kube.size("chat-decode") == 2


@double_only
async def test_an_empty_or_a_stale_list_is_no_observation(stage: KubeStage) -> None:
    api = double(stage)
    pods = {key: api.objects.pop(key) for key in list(api.objects) if key[0] == "pods"}
    with pytest.raises(ActuatorError, match="no pod is listed, of 1 that there are"):
        await stage.actuator.observe()
    api.objects |= pods
    await stage.actuator.observe()
    api._version -= 1
    with pytest.raises(ActuatorError, match="which is before"):
        await stage.actuator.observe()
    assert await stage.kube.size("chat-prefill") == 1


@double_only
async def test_no_order_is_given_during_a_rollout_but_to_add(stage: KubeStage) -> None:
    await ready(stage, "decode-1")
    await stage.kube.patch(
        stage.kube.path("pods", await stage.pod("decode-1")), {"metadata": {"labels": {TEMPLATE: "2"}}}
    )
    await stage.actuator.observe()
    with pytest.raises(ActuatorError, match="a rollout is under way"):
        await stage.actuator.drain("decode-0")
    await stage.actuator.add("decode-2", Role.DECODE)
    assert await stage.kube.size("chat-decode") == 3


@double_only
async def test_while_a_pod_is_yet_to_be_removed_none_is_added_that_would_keep_it(stage: KubeStage) -> None:
    await ready(stage, "decode-1")
    assert stage.kube.deployments is not None
    stage.kube.deployments.lags = True
    await stage.actuator.drain("decode-1")
    assert (await replicas(stage))["decode-1"] is State.DRAINING
    with pytest.raises(ActuatorError, match="has yet to be removed"):
        await stage.actuator.add("decode-2", Role.DECODE)
    await stage.actuator.drain("decode-1")
    assert await stage.kube.size("chat-decode") == 1
    stage.kube.deployments.lags = False
    stage.kube.deployments.act()
    await stage.until_gone("decode-1")
    assert "decode-0" in await replicas(stage)


@double_only
async def test_what_is_asked_is_what_the_table_of_rights_says(stage: KubeStage) -> None:
    """Of the test's own hand the calls are left out: pods' status, deployments themselves."""
    double(stage).calls.clear()
    await ready(stage, "decode-1")
    double(stage).calls.clear()
    await stage.actuator.observe()
    await stage.actuator.flip("decode-1", Role.PREFILL)
    await stage.actuator.add("decode-2", Role.DECODE)
    asked = {(call.verb, call.group, call.resource) for call in double(stage).calls}
    rights = {(verb, right.group, right.resource) for right in ACTUATOR for verb in right.verbs}
    assert asked == {right for right in rights if right[2] in ("pods", "deployments/scale")}
