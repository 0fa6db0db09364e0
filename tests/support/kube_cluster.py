"""A namespace of an API server, and a hand that does what kubelets and operators do there, through the API alone.

The server is the double of kube_api.py, or the one that PDSERVE_TEST_KUBECONFIG names; nothing here knows which. Pods
are never scheduled, so that no kubelet touches them, and a finalizer keeps a deleted one until its "kubelet" lets go.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

from kube_account import account, forbid, write_kubeconfig
from kube_api import KubeApi
from kube_deployments import Deployments
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import new_client_from_config

FINALIZER = "pdserve.dev/test"
MERGE = "application/merge-patch+json"
REAL = os.environ.get("PDSERVE_TEST_KUBECONFIG", "")


class KubeCluster:
    """One namespace. `double` is the server, where it is one."""

    def __init__(self, api: ApiClient, namespace: str, kubeconfig: Path) -> None:
        self._api = api
        self.namespace = namespace
        self.kubeconfig = kubeconfig
        self.double: KubeApi | None = None
        self.deployments: Deployments | None = None

    async def _answer(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        request = await self._api.param_serialize(
            method, path, header_params={"Content-Type": content_type}, body=body, auth_settings=["BearerToken"]
        )
        answer = await self._api.call_api(*request)
        return answer.status, await answer.read()

    async def ask(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:  # noqa: ANN401
        status, content = await self._answer(method, path, body, content_type)
        assert status < 400, f"{method} {path}: {status} {content.decode()}"
        return json.loads(content)

    async def refusal(self, path: str, changes: dict[str, Any]) -> str:
        """Return why the server does not change an object so."""
        status, content = await self._answer("PATCH", path, changes, MERGE)
        assert status == HTTPStatus.UNPROCESSABLE_ENTITY, content
        text: str = json.loads(content)["message"]
        return text

    async def status(self, path: str) -> int:
        return (await self._answer("GET", path))[0]

    async def forbid(self, verb: str, resource: str) -> None:
        """Take a right in the namespace from the account of this process's KUBECONFIG."""
        if self.double is None:
            return await forbid(self.ask, self.namespace, verb, resource)
        what, _, sub = resource.partition("/")
        forbidden = (verb, what, sub)
        self.double.allowed = lambda asked: (
            (asked["verb"], asked["resource"], asked.get("subresource", "")) != forbidden
        )
        return None

    def path(self, resource: str, name: str = "", group: str = "") -> str:
        base = f"/apis/{group}/v1" if group else "/api/v1"
        return "/".join(filter(None, [f"{base}/namespaces/{self.namespace}", resource, name]))

    async def patch(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        return await self.ask("PATCH", path, body, MERGE)

    async def make_deployment(self, name: str, replicas: int = 0) -> None:
        labels = {"app.kubernetes.io/component": name}
        spec = {"schedulerName": "pdserve-test", "containers": [{"name": "worker", "image": "registry.invalid/worker"}]}
        template = {"metadata": {"labels": labels, "finalizers": [FINALIZER]}, "spec": spec}
        body = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        await self.ask(
            "POST",
            self.path("deployments", group="apps"),
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": body},
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, with a request between two looks."""
        async with asyncio.timeout(60):
            while not holds():
                await self.ask("GET", self.path("deployments", group="apps"))

    async def until_exists(self, path: str) -> None:
        async with asyncio.timeout(60):
            while await self.status(path) == HTTPStatus.NOT_FOUND:
                pass

    async def pods(self) -> list[Any]:
        found: list[Any] = (await self.ask("GET", self.path("pods")))["items"]
        return found

    async def size(self, deployment: str) -> int:
        found: int = (await self.ask("GET", self.path("deployments", deployment, "apps")))["spec"]["replicas"]
        return found

    async def set_status(self, pod: str, *, ready: bool, **status: Any) -> None:  # noqa: ANN401
        conditions = [{"type": "Ready", "status": str(ready)}]
        await self.patch(
            f"{self.path('pods', pod)}/status", {"status": {"phase": "Running", "conditions": conditions, **status}}
        )

    async def let_go(self, pod: str) -> None:
        """Let a pod that is deleted be removed."""
        await self.patch(self.path("pods", pod), {"metadata": {"finalizers": None}})

    async def clear(self) -> None:
        if self.double is None:
            await self.ask("DELETE", f"/api/v1/namespaces/{self.namespace}")
            for pod in await self.pods():
                await self.let_go(pod["metadata"]["name"])


@asynccontextmanager
async def kube_cluster(tmp_path: Path) -> AsyncIterator[KubeCluster]:
    """Have a namespace of its own, with a server if none is named."""
    namespace, file = f"pdserve-test-{uuid4().hex[:8]}", tmp_path / "kubeconfig"
    if REAL:
        admin = Path(REAL)
        async with _connected(admin, namespace) as cluster:
            meta = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
            await cluster.ask("POST", "/api/v1/namespaces", meta)
            try:
                await cluster.until_exists(cluster.path("serviceaccounts", "default"))  # without it no pod is taken
                async with account(cluster.ask, namespace, admin, file):
                    cluster.kubeconfig = file
                    yield cluster
            finally:
                await cluster.clear()
        return
    async with KubeApi().serving() as api:
        deployments = Deployments(api)
        write_kubeconfig(file, {"server": api.address}, namespace)
        async with _connected(file, namespace) as cluster:
            cluster.double, cluster.deployments = api, deployments
            yield cluster


@asynccontextmanager
async def _connected(file: Path, namespace: str) -> AsyncIterator[KubeCluster]:
    async with await new_client_from_config(str(file), persist_config=False) as api:
        yield KubeCluster(api, namespace, file)
