"""The manifests of a release with two models: each answers for itself at the one address, and is lost alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_cluster import PROMPTS, Cluster, chart_cluster
from helm_chart import of_kind
from model_zoo import first_disagreement, load_oracle, write_model
from transformers import PreTrainedModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

FAMILIES = {"alpha": "llama3", "beta": "qwen3"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(family, folder / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def oracles(paths: dict[str, Path]) -> dict[str, PreTrainedModel]:
    return {name: load_oracle(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def cluster(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = [{"name": name, "model": {"path": str(path), "servedName": name}} for name, path in paths.items()]
    values = {"model": {"source": "builtIn"}, "models": models}
    with chart_cluster(paths["alpha"], tmp_path_factory.mktemp("node"), values) as running:
        yield running


def test_helm_test_asks_the_first_of_several_models(cluster: Cluster) -> None:
    (test,) = of_kind(cluster.node.manifests, "Pod").values()
    pod = cluster.node.run("chat-pdserve-test", "test", test["spec"])
    assert pod.process is not None
    assert pod.process.wait(60) == 0, pod.log


def test_pods_of_one_model_killed_without_grace_cost_the_other_nothing(
    cluster: Cluster, oracles: dict[str, PreTrainedModel]
) -> None:
    def answers(name: str) -> None:
        for prompt in PROMPTS:
            assert first_disagreement(oracles[name], prompt, cluster.ask(prompt, name)) is None, name

    for name in FAMILIES:
        answers(name)
    pods = [pod for part in ("prefill", "decode") for pod in cluster.kube.pods(part)]
    lost = [pod for pod in pods if pod.name.startswith("chat-pdserve-beta-")]
    assert len(lost) == 2
    for pod in lost:
        cluster.kube.delete(pod, grace=False)
    answers("alpha")
    cluster.node.until(lambda: all(map(cluster.kube.is_gone, lost)), "the pods are gone")
    answers("beta")  # once their successors are there
    left = {pod.name for part in ("prefill", "decode") for pod in cluster.kube.pods(part)}
    assert {pod.name for pod in pods if pod not in lost} <= left, "no pod of the other model was replaced"
