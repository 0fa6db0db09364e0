"""Several models of one release: each has processes of its own, and the frontends serve all."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_references import dangling, texts
from helm_chart import CHART, Manifest, helm, of_kind, refusal, rendered
from kubernetes_schemas import problems
from kubernetes_validate.utils import all_versions

from pdserve.autoscaler.schema import Policy
from pdserve.router.config import FrontendConfig, ModelSettings, RouterConfig
from pdserve.settings.config import WorkerConfig, load_config

ALPHA: Manifest = {
    "name": "alpha",
    "model": {"path": "/models/a", "servedName": "org/alpha"},
    "router": {"config": {"tool_call_parser": "mistral"}},
    "prefill": {"replicas": 2},
}
BETA: Manifest = {
    "name": "beta",
    "model": {"path": "/models/b", "servedName": "beta"},
    "autoscaling": {
        "by": "pdserve",
        "policy": {
            "objectives": {"ttftMs": 9, "tpotMs": 9},
            "budget": {"maxDevices": 3},
            "pools": {"prefill": {"maxReplicas": 2}, "decode": {"maxReplicas": 2}},
        },
    },
    "workers": {"config": {"num_pages": 77}},
}
SHARED: Manifest = {"model.source": "pvc", "model.pvc.claimName": "models"}
BOTH: Manifest = {**SHARED, "models": [ALPHA, BETA]}
OWN = ("router", "prefill", "decode", "autoscaler")


def settings(manifests: list[Manifest], name: str) -> Manifest:
    (text,) = of_kind(manifests, "ConfigMap")[f"chat-pdserve-{name}"]["data"].values()
    found: Manifest = yaml.safe_load(text)
    return found


def selected(manifests: list[Manifest], labels: dict[str, str]) -> set[str]:
    """Return the Deployments whose pods have these labels."""
    deployments = of_kind(manifests, "Deployment")
    pods = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in deployments.items()}
    return {name.removeprefix("chat-pdserve-") for name, own in pods.items() if labels.items() <= own.items()}


def test_each_model_has_processes_of_its_own_and_the_frontends_are_shared() -> None:
    manifests = rendered(BOTH)
    expected = {"frontend", *(f"{model}-{component}" for model in ("alpha", "beta") for component in OWN)}
    assert {name.removeprefix("chat-pdserve-") for name in of_kind(manifests, "Deployment")} == expected
    for name, deployment in of_kind(manifests, "Deployment").items():
        assert selected(manifests, deployment["spec"]["selector"]["matchLabels"]) == {
            name.removeprefix("chat-pdserve-")
        }
    services = of_kind(manifests, "Service")
    assert selected(manifests, services["chat-pdserve"]["spec"]["selector"]) == {"frontend"}
    for model in ("alpha", "beta"):
        routers = services[f"chat-pdserve-{model}-routers"]["spec"]["selector"]
        assert selected(manifests, routers) == {f"{model}-router"}
        address = [f"chat-pdserve-{model}-routers.llm.svc:50052"]
        for component in ("prefill", "decode", "autoscaler"):
            assert settings(manifests, f"{model}-{component}")["routers"] == address
        policy = of_kind(manifests, "NetworkPolicy")[f"chat-pdserve-{model}-router"]["spec"]
        assert selected(manifests, policy["podSelector"]["matchLabels"]) == {f"{model}-router"}
        peers = [each["podSelector"]["matchLabels"] for each in policy["ingress"][0]["from"]]
        assert [selected(manifests, labels) for labels in peers[1:]] == [{f"{model}-autoscaler"}, {"frontend"}]
        assert selected(manifests, peers[0]) == {f"{model}-{component}" for component in OWN}
    assert of_kind(manifests, "Deployment")["chat-pdserve-alpha-prefill"]["spec"]["replicas"] == 2
    assert [settings(manifests, f"{model}-decode").get("num_pages") for model in ("alpha", "beta")] == [None, 77]


def test_frontends_and_routers_take_the_settings_that_they_are_given(tmp_path: Path) -> None:
    manifests = rendered(BOTH)
    file = tmp_path / "settings.yaml"

    def loaded(kind: Any, name: str, **flags: str) -> Any:  # noqa: ANN401 - any process
        file.write_text(yaml.safe_dump(settings(manifests, name)), encoding="utf-8")
        return load_config(kind, file, flags)

    first, second = loaded(FrontendConfig, "frontend").of_models()
    assert (first.model, first.served_model_name, first.tool_call_parser) == ("/models/a", "org/alpha", "mistral")
    assert (second.model, second.served_model_name, second.tool_call_parser) == ("/models/b", "beta", "auto")
    assert [each.routers[0].partition(".")[0] for each in (first, second)] == [
        "chat-pdserve-alpha-routers",
        "chat-pdserve-beta-routers",
    ]
    for model in ("alpha", "beta"):
        assert not loaded(RouterConfig, f"{model}-router").serve_clients
        for pool in ("prefill", "decode"):
            loaded(WorkerConfig, f"{model}-{pool}", worker_id="w")


def test_what_clients_are_shown_of_a_model_is_as_its_router_is_given_it() -> None:
    given: dict[str, Any] = {
        "served_model_aliases": ["al"],
        "generation_config": "vllm",
        "tool_call_parser": "hermes",
        "reasoning_parser": "none",
        "allow_special_tokens_in_text": True,
        "max_model_len": 99,
        "lenient_schemas": True,
    }
    assert given.keys() == ModelSettings.model_fields.keys()
    models = [{**ALPHA, "router": {"config": given}}, BETA]
    for shared in ({}, {"frontends.config": {"tool_call_parser": "mistral", "max_model_len": 5}}):
        first, second = settings(rendered({**BOTH, "models": models, **shared}), "frontend")["models"]
        assert {key: first.get(key) for key in given} == given
        assert second.get("max_model_len") == shared.get("frontends.config", {}).get("max_model_len")


def test_each_model_follows_a_policy_of_its_own() -> None:
    """None of the chart's lies below it."""
    manifests = rendered({**BOTH, "autoscaling.policy.pools.decode.minReplicas": 2})
    maps = of_kind(manifests, "ConfigMap")
    assert "chat-pdserve-alpha-policy" not in maps
    policy = Policy.model_validate(yaml.safe_load(maps["chat-pdserve-beta-policy"]["data"]["policy.yaml"]))
    assert policy.objectives.ttft_ms == 9
    assert policy.pools.decode.min_replicas == 1
    role = of_kind(manifests, "Role")["chat-pdserve-beta-autoscaler"]
    named = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert named == {"chat-pdserve-beta-prefill", "chat-pdserve-beta-decode", "chat-pdserve-beta-autoscaler"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {
                "tls.identity": {"from": "certManager", "issuerRef": {"name": "authority"}},
                "monitoring.metrics": "PodMonitor",
            },
            marks=pytest.mark.long,
        ),
        {"frontends.replicas": 3, "autoscaling.by": "keda", "autoscaling.policyAs": "AutoscalingPolicy"},
        {"pods.serviceAccount.name": "all", "operator.serviceAccount.name": "operator"},
    ],
)
def test_several_models_are_manifests_that_kubernetes_takes_and_that_name_each_other(more: Manifest) -> None:
    manifests = rendered({**BOTH, **more})
    identities = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len({*identities}) == len(identities)
    assert [*dangling(manifests, {*texts([BOTH, more]), "public"})] == []
    newest = [*dict.fromkeys(version.rpartition(".")[0] for version in all_versions())][-1]
    for manifest in manifests:
        assert problems(manifest, newest) == []


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_series_of_a_model_have_its_name_as_the_label_by_which_rules_keep_models_apart(kind: str) -> None:
    values = {"monitoring.metrics": kind, "monitoring.rules.enabled": True}
    manifests = rendered({**BOTH, **values})
    (label,) = of_kind(manifests, kind)["chat-pdserve"]["spec"]["podTargetLabels"]
    assert {name.partition("-")[0] for name in selected(manifests, {label: "alpha"})} == {"alpha"}
    assert {name.partition("-")[0] for name in selected(manifests, {label: "beta"})} == {"beta"}
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    assert re.sub(r"\W", "_", label) in str(rules)  # as Prometheus' operator calls it
    assert "podTargetLabels" not in of_kind(rendered(values), kind)["chat-pdserve"]["spec"]


def test_models_of_the_hub_are_downloaded_once_to_a_claim_that_all_share() -> None:
    models = [{"name": name, "model": {"hub": {"repository": f"org/{name}"}}} for name in ("alpha", "beta")]
    manifests = rendered({"model.source": "hub", "model.persistence.enabled": True, "models": models})
    deployments = of_kind(manifests, "Deployment")

    def fetched(name: str) -> list[str]:
        pod = deployments[f"chat-pdserve-{name}"]["spec"]["template"]["spec"]
        (claim,) = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
        assert claim["persistentVolumeClaim"]["claimName"] == "chat-pdserve-models"
        return [each["command"][-1] for each in pod["initContainers"]]

    assert fetched("frontend") == ["org/alpha@main", "org/beta@main"]
    assert fetched("alpha-decode") == ["org/alpha@main"]
    assert [*of_kind(manifests, "PersistentVolumeClaim")] == ["chat-pdserve-models"]


HUB: Manifest = {"name": "h", "model": {"hub": {"repository": "org/m"}}}


REFUSED: list[tuple[Manifest, str]] = [
    ({**SHARED, "models": [ALPHA, {**BETA, "name": "alpha"}]}, "models.1.name: alpha is there twice"),
    (
        {**SHARED, "models": [{"name": "a", "model": {"path": "/models/a"}}]},
        "models.0.model.servedName: is required",
    ),
    (
        {
            **SHARED,
            "models": [
                {**ALPHA, "prefill": {"serviceAccount": {"name": "one"}}},
                {**BETA, "operator": {"serviceAccount": {"name": "one"}}},
            ],
        },
        "models.1.operator.serviceAccount.name: must differ from that of alpha-prefill",
    ),
    ({**SHARED, "models": [{**ALPHA, "model": {"servedName": "a"}}]}, "models.0.model.path: must be below /models"),
    ({**BOTH, "model.servedName": "m"}, "model.servedName: goes into each of models"),
    ({"model.source": "hub", "models": [HUB]}, "model.persistence.enabled: must be true where several models"),
    (
        {**BOTH, "fullnameOverride": "x" * 40, "models": [{**ALPHA, "name": "y" * 20}]},
        "61 characters; 50 are the limit",
    ),
    ({**BOTH, "models": [{"model": {}}]}, "name"),
    (
        {**BOTH, "models": [{**ALPHA, "router": {"config": {"enable_log_requests": True}}}]},
        "models.0.router.config: Additional property enable_log_requests is not allowed",
    ),
]
ALSO_REFUSED: list[tuple[Manifest, str]] = [
    (
        {**SHARED, "models": [ALPHA, {**BETA, "model": ALPHA["model"]}]},
        "models.1: org/alpha is the name of two",
    ),
    ({**SHARED, "models": [ALPHA, {**BETA, "name": "alpha-prefill"}]}, "models.1.name: alpha-prefill has the name"),
    (
        {**SHARED, "models": [{**ALPHA, "name": "a-autoscaler-2"}, BETA]},
        "models.0.name: a-autoscaler-2 has the name",
    ),
    (
        {**BOTH, "frontends.serviceAccount.name": "chat-pdserve-beta-autoscaler"},
        "models.1.operator.serviceAccount.name: must differ from that of frontend",
    ),
    ({**BOTH, "model.path": "/models/a"}, "model.path: goes into each of models"),
    (
        {**BOTH, "router.config": {"served_model_aliases": ["x"]}},
        "router.config.served_model_aliases: goes with one",
    ),
    ({**BOTH, "autoscaling.by": "hpa"}, "models.0.autoscaling.follow: desired goes with pdserve or keda"),
    ({**BOTH, "models": [{**ALPHA, "name": "A"}]}, "models.0.name: Does not match"),
    ({**BOTH, "models": [{**ALPHA, "router": {"service": {}}}]}, "service"),
    (
        {**SHARED, "models": [ALPHA, {**BETA, "router": {"config": {"served_model_aliases": ["org/alpha"]}}}]},
        "models.1: org/alpha is the name of two",
    ),
]


@pytest.mark.parametrize(
    ("values", "words"), [*REFUSED, *(pytest.param(*each, marks=pytest.mark.long) for each in ALSO_REFUSED)]
)
def test_values_of_several_models_that_cannot_be_are_refused_by_key(values: Manifest, words: str) -> None:
    assert words in refusal(values)


def test_lint_takes_several_models(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    model = {"source": "pvc", "pvc": {"claimName": "models"}}
    file.write_text(yaml.safe_dump({"model": model, "models": [ALPHA, BETA]}))
    helm("lint", "--strict", str(CHART), f"--values={file}")
