"""The manifests that the chart renders make a cluster that serves through what happens to pods."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_cluster import PROMPTS, Cluster, chart_cluster
from helm_chart import NAMESPACE, of_kind
from transformers import PreTrainedModel

from pdserve.autoscaler.kubernetes import PodActuator
from pdserve.autoscaler.observation import State
from pdserve.autoscaler.schema import KubernetesActuator, ScaleTarget
from pdserve.base.roles import Role
from pdserve.kubernetes.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with chart_cluster(model, tmp_path_factory.mktemp("node"), {}) as running:
        yield running


def test_helm_test_asks_a_question_and_gets_an_answer(cluster: Cluster) -> None:
    (test,) = of_kind(cluster.node.manifests, "Pod").values()
    pod = cluster.node.run("chat-pdserve-test", "test", test["spec"])
    assert pod.process is not None
    assert pod.process.wait(60) == 0, pod.log
    assert "prefill" in pod.log  # where the time of an answer went


def test_clients_of_openai_are_served_over_tls_with_a_key_alone(cluster: Cluster) -> None:
    assert cluster.complete(PROMPTS[0], key="pds_wrong").status_code == 401
    answer = cluster.complete(PROMPTS[0])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == cluster.ask(PROMPTS[0])


def test_probes_say_what_the_pod_is_at(cluster: Cluster) -> None:
    for component in ("router", "prefill", "decode", "autoscaler"):
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        assert [cluster.pod(component).holds(probe) for probe in probes] == [True, True, True]


@pytest.mark.long
def test_a_pod_deleted_without_grace_and_one_replaced_cost_no_client_an_error(
    cluster: Cluster, oracle: PreTrainedModel
) -> None:
    node = cluster.node
    with cluster.asked_all_the_time(oracle) as answered:
        node.until(lambda: len(answered) >= 4, "clients are served")
        lost = cluster.pod("decode")
        cluster.kube.delete(lost, grace=False)
        node.until(lambda: f"{lost.name}, process" in cluster.pod("autoscaler").log, "the watcher reports the end")
        node.until(lambda: cluster.kube.num_ready("decode") == 1, "there is a successor that is ready")
        seen = len(answered)
        cluster.replace("decode")
        node.until(lambda: len(answered) >= seen + 4, "clients are served by the successor")
        node.until(lambda: cluster.num_quarantined() == 0, "no page is in quarantine, if any ever was")


@pytest.mark.long
def test_an_upgrade_of_every_pod_costs_no_client_an_error(cluster: Cluster, oracle: PreTrainedModel) -> None:
    with cluster.asked_all_the_time(oracle) as answered:
        for component in ("prefill", "decode", "router"):
            seen = len(answered)
            cluster.replace(component)
            cluster.node.until(lambda seen=seen: len(answered) >= seen + 4, f"clients are served after {component}")  # type: ignore[misc]


@pytest.mark.long
def test_the_actuator_adds_a_replica_and_drains_one_while_clients_ask(
    cluster: Cluster, oracle: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kube.kubeconfig))
    first = cluster.pod("decode")
    with cluster.asked_all_the_time(oracle) as answered:
        asyncio.run(_grow_and_shrink(cluster))
        seen = len(answered)
        cluster.node.until(lambda: len(answered) >= seen + 4, "clients are served by the replica that was added")
    assert cluster.kube.status_of(first) == 0, first.log


async def _grow_and_shrink(cluster: Cluster) -> None:
    """Add a decode worker through the scale subresource, then drain the one that was there before."""
    prefill, decode = (ScaleTarget(name=f"chat-pdserve-{pool}") for pool in ("prefill", "decode"))
    settings = KubernetesActuator(namespace=NAMESPACE, prefill=prefill, decode=decode)
    async with Client.connected() as client, asyncio.timeout(120):
        actuator = PodActuator(client, cluster.operator(), settings)

        async def decoding() -> dict[str, State]:
            return {held.name: held.state for held in await actuator.observe() if held.role is Role.DECODE}

        (old,) = await decoding()
        await actuator.add("decode-added", Role.DECODE)
        while [*(await decoding()).values()] != [State.READY, State.READY]:
            pass  # each look is a few requests to the API
        await actuator.drain(old)
        while old in await decoding():
            pass
