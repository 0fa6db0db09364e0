"""A cluster that follows a policy begins as small as the policy allows."""

from pathlib import Path

import pytest

from pdserve.autoscaler.actuator import PoolSizes, sizes_at_start
from pdserve.base.errors import ConfigError

POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 1000, tpotMs: 100}
budget: {maxDevices: 9}
pools:
  prefill: {maxReplicas: 2, devicesPerReplica: 2}
  decode: {minReplicas: 3, maxReplicas: 4, devicesPerReplica: 2}
"""


def test_it_begins_with_the_least_of_each_pool_and_has_at_most_what_the_budget_holds(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    assert sizes_at_start(file) == PoolSizes(prefill=1, decode=3, max_workers=4)


def test_a_policy_of_another_actuator_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"{POLICY}actuator: {{kind: publish}}\n")
    with pytest.raises(ConfigError, match="publish starts no workers of this cluster"):
        sizes_at_start(file)
