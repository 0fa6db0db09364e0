"""`pdserve doctor` asks Kubernetes for the rights that an autoscaler needs, and names the one that is missing."""

from pathlib import Path

import pytest
from kube_cluster import KubeCluster

from pdserve.autoscaler.actuators import KubernetesActuator, ScaleTarget
from pdserve.cli.doctor import policy_findings
from pdserve.doctor.finding import Level
from pdserve.doctor.rights import needed

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


async def test_all_rights_are_there_or_the_missing_one_is_named(kube: KubeCluster) -> None:
    if kube.double is None:
        pytest.skip("what a real account may do is not ours to take away")
    findings = await policy_findings(POLICY)
    assert [finding.level for finding in findings] == [Level.OK] * 2
    kube.double.allowed = lambda asked: (asked["resource"], asked["verb"]) != ("pods", "patch")
    _, missing = await policy_findings(POLICY)
    assert missing.level is Level.FAILED
    assert missing.seen.startswith("this account may not patch pods in ")


async def test_an_api_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    _, finding = await policy_findings(POLICY)
    assert (finding.name, finding.level) == ("rights", Level.FAILED)
