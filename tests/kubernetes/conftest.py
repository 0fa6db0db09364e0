from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kube_cluster import KubeCluster, kube_cluster


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeCluster]:
    """Yield a namespace of an API server; this process's KUBECONFIG names it."""
    async with kube_cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster
