import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from helm_chart import CHART
from kube_api import KubeApi
from kube_cluster import KubeCluster, kube_cluster


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeCluster]:
    """Yield a namespace of an API server; this process's KUBECONFIG names it."""
    async with kube_cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster


@pytest.fixture
async def definition(kube: KubeCluster) -> AsyncIterator[None]:
    """Have the definition of policies as resources; it is removed where there was none."""
    definition = yaml.safe_load((CHART / "crds" / "autoscalingpolicies.yaml").read_text(encoding="utf-8"))
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    own = f"{path}/{definition['metadata']['name']}"
    is_new = await kube.status(own) == 404
    if is_new:
        await kube.ask("POST", path, definition)
        await kube.until_exists(f"/apis/pdserve.dev/v1alpha1/namespaces/{kube.namespace}/autoscalingpolicies")
    yield
    if is_new:
        await kube.ask("DELETE", own)
        async with asyncio.timeout(60):
            while await kube.status(own) != 404:  # the next test makes it anew
                pass


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of this process's KUBECONFIG, which is yet to be written."""
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with KubeApi().serving() as api:
        yield api
