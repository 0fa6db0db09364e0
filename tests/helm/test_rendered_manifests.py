"""What the chart renders is what Kubernetes takes, and keeps what it promises."""

import json
import os
from pathlib import Path

import pytest
import yaml
from chart_cases import CASES, EVERYTHING
from chart_references import dangling, texts
from helm_chart import CHART, Manifest, helm, of_kind, pods, rendered, settings_of
from kubernetes_schemas import problems
from kubernetes_validate.utils import all_versions
from policy_definition import definition

from pdserve.autoscaler.schema import KubernetesActuator, Policy
from pdserve.kubernetes.objects import GROUP, KIND, VERSION
from pdserve.router.config import FrontendConfig, RouterConfig
from pdserve.settings.autoscaler import AutoscalerConfig, WatcherConfig
from pdserve.settings.config import WorkerConfig, load_config
from pdserve.settings.worker_node import WorkerNodeConfig

NEWEST = [*dict.fromkeys(version.rpartition(".")[0] for version in all_versions())][-3:]  # each is listed twice
NOT_RANDOM = {"Secret": ("data", "stringData")}  # keys and certificates differ each time


@pytest.mark.parametrize("name", CASES)
def test_every_manifest_is_valid_for_the_newest_versions_of_kubernetes(name: str) -> None:
    values, files = CASES[name]
    manifests = rendered(values, *files)
    components = {"router", "prefill", "decode", "autoscaler", *(["frontend"] if "frontends" in values else [])}
    workloads = {*of_kind(manifests, "Deployment"), *of_kind(manifests, "LeaderWorkerSet")}
    assert workloads == {f"chat-pdserve-{component}" for component in components}
    for version in NEWEST:
        for manifest in manifests:
            assert problems(manifest, version) == []


@pytest.mark.parametrize("file", [pytest.param("laptop", marks=pytest.mark.long), "h100-rdma", "several-nodes"])
def test_lint_finds_nothing(file: str) -> None:
    helm("lint", "--strict", str(CHART), f"--values={CHART / 'values' / file}.yaml")


@pytest.mark.parametrize("name", ["defaults", "everything"])
def test_the_manifests_are_those_that_were_looked_at(name: str, request: pytest.FixtureRequest) -> None:
    """Run this test with WRITE_GOLDEN=1, look at the difference, and commit it."""
    values, files = CASES[name]
    manifests = [
        {key: value for key, value in each.items() if key not in NOT_RANDOM.get(each["kind"], ())}
        for each in rendered(values, *files)
        if not each["metadata"]["name"].endswith("dashboards")
    ]
    shown = yaml.safe_dump_all(manifests, width=150, default_flow_style=None)
    golden = request.path.parent / "golden" / f"{name}.yaml"
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_every_pod_is_restricted_but_for_what_rdma_needs(name: str) -> None:
    values, files = CASES[name]
    for component, pod in pods(rendered(values, *files)).items():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is (component == "autoscaler")
        shared = ("hostNetwork", "hostIPC", "hostPID", "shareProcessNamespace")  # or ranks could outlive rank 0
        assert not any(pod.get(each) for each in shared)
        for container in pod["containers"] + pod.get("initContainers", []):
            confined = container["securityContext"]
            assert confined["readOnlyRootFilesystem"] is True
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["capabilities"]["drop"] == ["ALL"]
            assert confined["capabilities"].get("add", []) in ([], ["IPC_LOCK"])
            assert "add" not in confined["capabilities"] or "rdma" in str(container["resources"]["limits"])
        for volume in pod["volumes"]:
            assert volume.keys() - {"name"} <= {"secret", "configMap", "emptyDir", "persistentVolumeClaim", "image"}
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440


@pytest.mark.parametrize("name", CASES)
def test_what_manifests_name_is_there(name: str) -> None:
    values, files = CASES[name]
    known = [yaml.safe_load((CHART / "values" / f"{file}.yaml").read_text(encoding="utf-8")) for file in files]
    manifests = rendered(values, *files)
    assert [*dangling(manifests, {*texts([values, *known]), "public"})] == []


@pytest.mark.parametrize("name", ["several-nodes", "frontends", "shared-models", "everything"])
def test_what_is_left_out_of_the_manifests_is_missed(name: str) -> None:
    """Proves the test above."""
    values, files = CASES[name]
    manifests = rendered(values, *files)
    named = ("ConfigMap", "ServiceAccount", "Certificate", "Secret", "PersistentVolumeClaim")
    made = [each for each in manifests if each["kind"] in named and each["metadata"]["name"].startswith("chat-pdserve")]
    made = [each for each in made if not each["metadata"]["name"].endswith("dashboards")]
    given = {"public", "shared", "keys", "hub", *"rwof"}
    assert made
    for left_out in made:
        found = [*dangling([each for each in manifests if each is not left_out], given)]
        assert any(left_out["metadata"]["name"] in each for each in found), left_out["metadata"]["name"]
    for port in ("public", "internal", "metrics"):
        others = json.loads(json.dumps(manifests).replace(f'"targetPort": "{port}"', '"targetPort": "another"'))
        assert others == manifests or [*dangling(others, ())]


@pytest.mark.parametrize("name", CASES)
def test_a_pod_is_killed_half_a_minute_after_its_sleep_and_its_drain_end(name: str) -> None:
    values, files = CASES[name]
    manifests = rendered(values, *files)
    for component, pod in pods(manifests).items():
        if component != "test":
            hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
            drain_s = yaml.safe_load(settings_of(manifests, component))["drain_timeout_s"]
            assert pod["terminationGracePeriodSeconds"] == hook["sleep"]["seconds"] + drain_s + 30


CONFIGS = {
    "router": RouterConfig,
    "frontend": FrontendConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    **dict.fromkeys(("prefill-node", "decode-node"), WorkerNodeConfig),
}
OPERATORS = {("autoscale", "run"): AutoscalerConfig, ("watch-pods",): WatcherConfig}


@pytest.mark.parametrize("name", CASES)
def test_every_process_takes_the_settings_that_it_is_given(name: str, tmp_path: Path) -> None:
    values, files = CASES[name]
    manifests = rendered(values, *files)
    for component, pod in pods(manifests).items():
        if component == "test":
            continue
        (container,) = pod["containers"]
        command = container["command"][1:]
        config = OPERATORS.get(tuple(command))
        file = tmp_path / f"{component}.yaml"
        file.write_text(settings_of(manifests, component), encoding="utf-8")
        words = [word.replace("$(LWS_WORKER_INDEX)", "1") for word in container["args"]]
        given = dict(word[2:].split("=", 1) for word in words)
        flags = {key.replace("-", "_"): value for key, value in given.items() if key != "config"}
        load_config(config or CONFIGS[component], file, flags)


def test_both_pools_are_alike_but_for_their_names() -> None:
    manifests = of_kind(rendered({}), "Deployment")
    prefill, decode = (json.dumps(manifests[f"chat-pdserve-{pool}"]) for pool in ("prefill", "decode"))
    known = {
        each["metadata"]["annotations"]["checksum/config"]
        for each in (json.loads(text)["spec"]["template"] for text in (prefill, decode))
    }
    for checksum in known:
        prefill, decode = prefill.replace(checksum, "-"), decode.replace(checksum, "-")
    assert prefill.replace("prefill", "decode") == decode


def test_a_pool_overrides_what_both_have_and_what_all_pods_have() -> None:
    values = {
        "pods.drainTimeoutSeconds": 7,
        "workers.resources": {"limits": {"cpu": "3"}},
        "decode.replicas": 0,
        "decode.resources.limits.cpu": "5",
        "decode.podDisruptionBudget.enabled": False,
    }
    manifests = rendered(values)
    found = pods(manifests)
    assert {name: pod["terminationGracePeriodSeconds"] for name, pod in found.items() if name != "test"} == {
        "router": 42,
        "prefill": 37,
        "decode": 37,
        "autoscaler": 35,
    }
    cpus = {name: found[name]["containers"][0]["resources"]["limits"]["cpu"] for name in ("prefill", "decode")}
    assert cpus == {"prefill": "3", "decode": "5"}
    assert of_kind(manifests, "Deployment")["chat-pdserve-decode"]["spec"]["replicas"] == 0
    assert of_kind(manifests, "PodDisruptionBudget").keys() == {"chat-pdserve-router", "chat-pdserve-prefill"}


def test_devices_and_rdma_become_resources_and_settings() -> None:
    manifests = rendered(EVERYTHING)
    for pool, capabilities in (("prefill", {"drop": ["ALL"], "add": ["IPC_LOCK"]}), ("decode", {"drop": ["ALL"]})):
        (container,) = pods(manifests)[pool]["containers"]
        assert container["resources"]["limits"].items() >= {"nvidia.com/gpu": 2, "rdma/ib": 1}.items()
        assert container["securityContext"]["capabilities"] == capabilities
        settings = yaml.safe_load(of_kind(manifests, "ConfigMap")[f"chat-pdserve-{pool}"]["data"][f"{pool}.yaml"])
        given = {"device": "cuda", "tensor_parallel_size": 2, "handoff_rdma_devices": ["mlx5_0:1"]}
        assert settings.items() >= given.items()


def test_pools_of_workers_with_one_device_and_with_several_have_pages_alike() -> None:
    for counts, own in (({"prefill": 1, "decode": 2}, True), ({"prefill": 1, "decode": 1}, False), ({}, False)):
        devices = {f"{pool}.devices.count": count for pool, count in counts.items()}
        maps = of_kind(rendered({"autoscaling.policy.roleSwitch.enabled": False, **devices}), "ConfigMap")
        for pool in ("prefill", "decode"):
            settings = yaml.safe_load(maps[f"chat-pdserve-{pool}"]["data"][f"{pool}.yaml"])
            assert ("rank_memory" in settings) == own
            if own:
                assert settings["rank_memory"] == "own"


def test_what_scales_itself_has_no_fixed_number_of_replicas() -> None:
    for by in ("pdserve", "hpa", "keda"):
        deployments = of_kind(rendered({"autoscaling.by": by}), "Deployment")
        free = {name for name, each in deployments.items() if "replicas" not in each["spec"]}
        assert free == {"chat-pdserve-prefill", "chat-pdserve-decode"}


def test_no_two_autoscalers_publish_sizes_at_once_where_an_hpa_adds_them_up() -> None:
    for by, strategy in (("hpa", {"type": "Recreate"}), ("pdserve", None)):
        deployments = of_kind(rendered({"autoscaling.by": by}), "Deployment")
        assert deployments["chat-pdserve-autoscaler"]["spec"].get("strategy") == strategy


def test_the_policy_document_is_one_that_the_autoscaler_takes() -> None:
    for by, kind in (("pdserve", "kubernetes"), ("keda", "publish")):
        maps = of_kind(rendered({"autoscaling.by": by}), "ConfigMap")
        policy = Policy.model_validate(yaml.safe_load(maps["chat-pdserve-policy"]["data"]["policy.yaml"]))
        assert policy.actuator.kind == kind


def test_the_policy_as_a_resource_is_one_that_the_autoscaler_follows() -> None:
    manifests = rendered({"autoscaling.by": "pdserve", "autoscaling.policyAs": "AutoscalingPolicy"})
    resource = of_kind(manifests, "AutoscalingPolicy")["chat-pdserve"]
    named = f"{GROUP}/{VERSION}"
    assert resource["apiVersion"] == named
    policy = Policy.model_validate({"apiVersion": "pdserve/v1alpha1", "kind": KIND, **resource["spec"]})
    assert isinstance(policy.actuator, KubernetesActuator)
    maps = of_kind(manifests, "ConfigMap")
    assert "chat-pdserve-policy" not in maps
    config = yaml.safe_load(maps["chat-pdserve-autoscaler"]["data"]["autoscaler.yaml"])
    assert config["policy_resource"] == f"{resource['metadata']['namespace']}/chat-pdserve"
    assert "policy" not in config


def test_the_chart_brings_the_definition_of_policies() -> None:
    """Run `make generated` where a field of policies has changed."""
    (file,) = (CHART / "crds").iterdir()
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == definition()


def test_selectors_of_workloads_do_not_follow_a_role() -> None:
    manifests = rendered({})
    for deployment in of_kind(manifests, "Deployment").values():
        assert "pdserve.dev/role" not in deployment["spec"]["selector"]["matchLabels"]
    assert _role(manifests, "decode") == "decode"


def _role(manifests: list[Manifest], pool: str) -> str:
    found: str = of_kind(manifests, "Deployment")[f"chat-pdserve-{pool}"]["spec"]["template"]["metadata"]["labels"][
        "pdserve.dev/role"
    ]
    return found
