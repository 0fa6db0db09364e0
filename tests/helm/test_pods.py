"""Every pod takes the same keys, by one mechanism, whatever component it is of."""

import pytest
from helm_chart import Manifest, of_kind, pods, refusal, rendered

PARTS = {
    "router": "router",
    "frontends": "frontend",
    "prefill": "prefill",
    "decode": "decode",
    "operator": "autoscaler",
}
SIDECAR = {"name": "sidecar", "image": "sidecar:1"}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
GIVEN = {
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}},
    "initContainers": [{"name": "before", "image": "before:1"}],
    "extraContainers": [SIDECAR],
    "extraEnvFrom": [{"secretRef": {"name": "variables"}}],
    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
    "podSecurityContext": {"runAsUser": 1000, "supplementalGroups": [7]},
    "topologySpreadConstraints": [SPREAD],
}


@pytest.mark.parametrize(("part", "component"), PARTS.items())
def test_a_component_takes_what_all_pods_take(part: str, component: str) -> None:
    manifests = rendered({"frontends.replicas": 1, **{f"{part}.{key}": value for key, value in GIVEN.items()}})
    pod, others = pods(manifests)[component], set(PARTS.values()) - {component}
    (main, sidecar) = pod["containers"]
    assert sidecar == SIDECAR
    assert [each["name"] for each in pod["initContainers"]] == ["before"]
    assert main["envFrom"] == GIVEN["extraEnvFrom"]
    assert main["lifecycle"] == GIVEN["lifecycle"]
    assert (
        pod["securityContext"].items() >= {"runAsUser": 1000, "supplementalGroups": [7], "runAsNonRoot": True}.items()
    )
    (spread,) = pod["topologySpreadConstraints"]
    selected = {
        "matchLabels": of_kind(manifests, "Deployment")[f"chat-pdserve-{component}"]["spec"]["selector"]["matchLabels"]
    }
    assert spread == {**SPREAD, "labelSelector": selected}
    account = of_kind(manifests, "ServiceAccount")[f"chat-pdserve-{component}"]
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn"}
    for other in others:
        assert len(pods(manifests)[other]["containers"]) == 1
        assert "envFrom" not in pods(manifests)[other]["containers"][0]


def test_the_models_download_comes_before_other_init_containers() -> None:
    """They may read the model."""
    hub = {
        "model.source": "hub",
        "model.hub.repository": "some/model",
        "workers.initContainers": GIVEN["initContainers"],
    }
    assert [each["name"] for each in pods(rendered(hub))["decode"]["initContainers"]] == ["download", "before"]


def test_pods_run_as_the_account_that_is_named() -> None:
    manifests = rendered(
        {"pods.serviceAccount": {"create": False, "name": "given"}, "operator.serviceAccount.name": "own"}
    )
    used = {name: pod["serviceAccountName"] for name, pod in pods(manifests).items() if name != "test"}
    assert used == {"router": "given", "prefill": "given", "decode": "given", "autoscaler": "own"}
    assert of_kind(manifests, "ServiceAccount") == {}
    assert _subjects(manifests) == {"own"}


def test_an_account_that_pools_share_is_made_once() -> None:
    manifests = rendered({"workers.serviceAccount.name": "workers"})
    names = [each["metadata"]["name"] for each in manifests if each["kind"] == "ServiceAccount"]
    assert sorted(names) == ["chat-pdserve-autoscaler", "chat-pdserve-router", "workers"]


def test_no_other_pod_may_run_as_the_operator() -> None:
    """It may change the sizes of pools."""
    public = {"from": "secret", "existingSecret": "public"}
    said = refusal({"pods.serviceAccount.name": "all", "frontends.replicas": 1, "tls.public": public})
    for component in ("router", "frontend", "prefill", "decode"):
        assert f"operator.serviceAccount.name: must differ from that of {component}" in said


def test_the_grace_period_has_room_for_the_drain_and_for_the_sleep_before_it() -> None:
    found = pods(rendered({"router.preStopSleepSeconds": 90, "router.drainTimeoutSeconds": 10}))
    assert found["router"]["terminationGracePeriodSeconds"] == 90 + 10 + 30
    hook = {"preStop": {"sleep": {"seconds": 7}}}
    found = pods(rendered({"pods.lifecycle": hook, "pods.drainTimeoutSeconds": 10}))
    assert [found[pool]["terminationGracePeriodSeconds"] for pool in ("router", "decode")] == [7 + 10 + 30] * 2


def test_a_hook_replaces_the_one_that_others_have_and_leaves_other_hooks() -> None:
    """A hook has one action: two that are merged are refused by Kubernetes."""
    command, sleep = {"exec": {"command": ["true"]}}, {"sleep": {"seconds": 7}}
    values = {
        "pods.lifecycle": {"preStop": command, "postStart": command},
        "workers.lifecycle": {"postStart": sleep},
        "decode.lifecycle": {"preStop": sleep},
    }
    found = {name: pod["containers"][0].get("lifecycle") for name, pod in pods(rendered(values)).items()}
    assert found["router"] == {"preStop": command, "postStart": command}
    assert found["prefill"] == {"preStop": command, "postStart": sleep}
    assert found["decode"] == {"preStop": sleep, "postStart": sleep}


def _subjects(manifests: list[Manifest]) -> set[str]:
    return {subject["name"] for each in manifests if each["kind"].endswith("Binding") for subject in each["subjects"]}
