"""`pdserve doctor` asks Kubernetes for the rights that an autoscaler needs, and names the one that is missing."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_cluster import KubeCluster

from pdserve.autoscaler.schema import KubernetesActuator, ScaleTarget
from pdserve.doctor.machine import Level
from pdserve.doctor.settings import needed, policy_findings, resource_findings

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "deploy/policies/kubernetes.yaml"
SCALED = KubernetesActuator(namespace="chat", prefill=ScaleTarget(name="p"), decode=ScaleTarget(name="d"))


def test_an_autoscaler_asks_for_its_own_objects_by_name_and_a_watcher_for_less() -> None:
    asked = {str(action) for action in needed(SCALED, "elsewhere")}
    assert {"update deployments/scale p in chat", "get deployments/scale d in chat"} <= asked
    assert {"update leases pdserve-autoscaler in chat", "create leases in chat"} <= asked
    assert {"get nodes", "get leases in kube-node-lease", "watch pods in chat", "patch pods in chat"} <= asked
    watched = {str(action) for action in needed(None, "chat")}
    assert watched < asked
    assert not any("deployments" in action or "patch" in action for action in watched)
    with_resource = {str(action) for action in needed(SCALED, "elsewhere", "other/policy")}
    assert with_resource - asked == {
        "get autoscalingpolicies policy in other",
        "patch autoscalingpolicies/status policy in other",
    }


def policy_in(namespace: str) -> dict[str, Any]:
    """Return the example, with the names for which the account has rights."""
    policy: dict[str, Any] = yaml.safe_load(POLICY.read_text(encoding="utf-8"))
    names = {"prefill": {"name": "chat-prefill"}, "decode": {"name": "chat-decode"}, "lease": "chat-autoscaler"}
    policy["actuator"] |= {"namespace": namespace, **names}
    return policy


async def test_all_rights_are_there_or_the_missing_one_is_named(kube: KubeCluster, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(policy_in(kube.namespace)), encoding="utf-8")
    findings = await policy_findings(policy, None)
    assert [finding.level for finding in findings] == [Level.OK] * 2, findings
    await kube.forbid("patch", "pods")
    _, missing = await policy_findings(policy, None)
    assert missing.level is Level.FAILED
    assert missing.seen == f"this account may not patch pods in {kube.namespace}"


async def test_an_api_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    _, finding = await policy_findings(POLICY, None)
    assert (finding.name, finding.level) == ("rights", Level.FAILED)


@pytest.mark.usefixtures("definition")
async def test_a_policy_that_kubernetes_holds_is_checked_with_the_rights_on_it(kube: KubeCluster) -> None:
    reference = f"{kube.namespace}/chat"
    (absent,) = await resource_findings(reference)
    assert (absent.name, absent.level) == ("policy", Level.FAILED)
    spec = {key: value for key, value in policy_in(kube.namespace).items() if key not in {"apiVersion", "kind"}}
    resource = {"apiVersion": "pdserve.dev/v1alpha1", "kind": "AutoscalingPolicy", "metadata": {"name": "chat"}}
    path = f"/apis/pdserve.dev/v1alpha1/namespaces/{kube.namespace}/autoscalingpolicies"
    await kube.ask("POST", path, {**resource, "spec": spec})
    await kube.forbid("patch", "autoscalingpolicies/status")
    found, missing = await resource_findings(reference)
    assert (found.level, found.seen) == (Level.OK, f"{reference}: kubernetes")
    assert missing.seen == f"this account may not patch autoscalingpolicies/status chat in {kube.namespace}"
