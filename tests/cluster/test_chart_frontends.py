"""Where the chart's frontends serve the clients, these keep their answers when a router is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_cluster import PROMPTS, Cluster, chart_cluster
from helm_chart import of_kind
from transformers import PreTrainedModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster whose router reads no model: its pod has no volume for one."""
    waiting = {"router_grace_s": 120}  # a router starts slowly on a busy machine
    values = {
        "frontends": {"replicas": 1, "drainTimeoutSeconds": 30, "config": waiting},
        "model.servedName": "m",
    }
    with chart_cluster(model, tmp_path_factory.mktemp("node"), values) as running:
        yield running


def test_probes_say_that_routers_and_frontends_serve(cluster: Cluster) -> None:
    for component in ("router", "frontend"):
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        assert [cluster.pod(component).holds(probe) for probe in probes] == [True, True, True]


def test_helm_test_and_clients_of_openai_are_served(cluster: Cluster) -> None:
    (test,) = of_kind(cluster.node.manifests, "Pod").values()
    pod = cluster.node.run("chat-pdserve-test", "test", test["spec"])
    assert pod.process is not None
    assert pod.process.wait(60) == 0, pod.log
    assert cluster.complete(PROMPTS[0], key="pds_wrong").status_code == 401
    assert cluster.complete(PROMPTS[0]).json()["choices"][0]["token_ids"] == cluster.ask(PROMPTS[0])


def test_the_only_router_killed_without_grace_costs_no_client_an_error(
    cluster: Cluster, oracle: PreTrainedModel
) -> None:
    node, lost = cluster.node, cluster.pod("router")
    with cluster.asked_all_the_time(oracle) as answered:
        node.until(lambda: len(answered) >= 4, "clients are served")
        cluster.kube.delete(lost, grace=False)
        node.until(lambda: cluster.kube.is_gone(lost), "the router is gone")
        node.until(lambda: cluster.kube.num_ready("router") == 1, "there is a successor that is ready")
        seen = len(answered)
        node.until(lambda: len(answered) >= seen + 4, "clients are served by the successor")


def test_an_upgrade_of_routers_and_frontends_costs_no_client_an_error(
    cluster: Cluster, oracle: PreTrainedModel
) -> None:
    with cluster.asked_all_the_time(oracle) as answered:
        for component in ("router", "frontend"):
            seen = len(answered)
            cluster.replace(component)
            cluster.node.until(lambda seen=seen: len(answered) >= seen + 4, f"clients are served after {component}")  # type: ignore[misc]
