"""A cluster whose pools end without requests serves the first one that comes, over each protocol, late and whole."""

import json
import urllib.request
from pathlib import Path

import pytest
from live_cluster import greedy, live_cluster
from looking import until
from model_zoo import first_disagreement
from transformers import PreTrainedModel

POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 500, tpotMs: 500}
budget: {maxDevices: 2}
interval: {forecast: 2s, react: 300ms}
pools:
  prefill: &pool
    minReplicas: 0
    maxReplicas: 1
    startup: 1s
    behavior: {scaleDown: {stabilizationWindowSeconds: 2}}
  decode: *pool
roleSwitch: {enabled: false, minDwell: 0s}
"""

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_the_first_request_starts_both_pools(model: Path, oracle: PreTrainedModel, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    flags = ("--dtype", "float32", "--num-pages", "100", "--policy", str(policy))
    with live_cluster(tmp_path, model, *flags) as cluster:
        cluster.wait_for(lambda status: not status.workers, 60)
        until(lambda: {process.role for process in cluster.state.processes} == {"router", "autoscaler"})
        with urllib.request.urlopen(f"{cluster.state.http}/ready", timeout=10) as ready:
            assert ready.status == 200
        request = greedy([4, 5, 6], 8)
        request.slo.ttft_ms = 500.0  # less than any start-up
        answer = cluster.generate(request)
        assert first_disagreement(oracle, [4, 5, 6], answer.tokens[0]) is None
        assert len(answer.tokens[0]) == 8
        cluster.wait_for(lambda status: not status.workers, 60)
        body = json.dumps({"prompt": [4, 5, 6], "max_tokens": 8, "temperature": 0, "return_token_ids": True}).encode()
        asked = urllib.request.Request(
            f"{cluster.state.http}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            (choice,) = json.load(response)["choices"]
        assert choice["token_ids"] == answer.tokens[0]
