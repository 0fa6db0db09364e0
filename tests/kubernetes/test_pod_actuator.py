"""Pods of deployments as an actuator, through a server's API."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from actuator_suite import ActuatorSuite
from kube_cluster import KubeCluster
from kube_stage import KubeStage, kube_stage


@pytest.fixture
async def stage(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[KubeStage]:
    async with kube_stage(kube, tmp_path) as stage:
        yield stage


class TestPodActuator(ActuatorSuite):
    pass
