"""The chart's autoscaler, started by its manifest, keeps pools as its policy, a custom resource, says."""

from pathlib import Path

import pytest
from chart_cluster import Cluster, chart_cluster
from transformers import PreTrainedModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]

VALUES = {
    "autoscaling.by": "pdserve",
    "autoscaling.policyAs": "AutoscalingPolicy",
    "autoscaling.policy": {
        "objectives": {"ttftMs": 10_000, "tpotMs": 1_000},
        "budget": {"maxDevices": 4},
        "interval": {"forecast": "5s", "react": "500ms"},
        "pools": {"prefill": {"maxReplicas": 1}, "decode": {"maxReplicas": 1}},
    },
}


def test_pools_follow_a_policy_that_is_changed_and_no_client_sees_an_error(
    model: Path, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    with chart_cluster(model, tmp_path, VALUES) as cluster, cluster.asked_all_the_time(oracle) as answered:
        kube, node = cluster.kube, cluster.node
        node.until(lambda: len(answered) >= 4, "clients are served")
        node.until(lambda: _size(cluster, "replicas") == 1, "the policy's status shows the pool")
        first = cluster.pod("decode")
        _resize(cluster, 2)
        node.until(lambda: kube.num_ready("decode") == 2, "the pool has grown")
        assert _size(cluster, "desired") == 2
        seen = len(answered)
        node.until(lambda: len(answered) >= seen + 8, "clients are served")
        _resize(cluster, 1)
        node.until(lambda: len(kube.pods("decode")) == 1, "the pool has shrunk")
        (left,) = kube.pods("decode")
        if left is not first:
            assert kube.status_of(first) == 0, first.log
        seen = len(answered)
        node.until(lambda: len(answered) >= seen + 4, "clients are served")
        assert kube.find("deployments", "chat-pdserve-decode")["spec"]["replicas"] == 1
        assert kube.event_reasons() == {"ScalingUp", "ScalingDown"}


def _resize(cluster: Cluster, replicas: int) -> None:
    """Ask for this many decode workers, as `kubectl edit asp` would."""
    limits = {"minReplicas": replicas, "maxReplicas": replicas}
    cluster.kube.patch("autoscalingpolicies", "chat-pdserve", {"spec": {"pools": {"decode": limits}}})


def _size(cluster: Cluster, name: str) -> int | None:
    """Return a number of the decode pool as `kubectl get asp` shows it."""
    status = cluster.kube.find("autoscalingpolicies", "chat-pdserve").get("status", {})
    found: int | None = status.get("decode", {}).get(name)
    return found
