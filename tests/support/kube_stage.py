"""Kubernetes as the stage of an actuator: deployments of a namespace, and a router to which ready pods are attached."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from admin_stub import Router, serving
from kube_cluster import KubeCluster

from pdserve.autoscaler.kubernetes import PodActuator
from pdserve.autoscaler.observation import State
from pdserve.autoscaler.schema import KubernetesActuator as Settings
from pdserve.autoscaler.schema import ScaleTarget
from pdserve.base.roles import Role
from pdserve.kubernetes.client import Client
from pdserve.launch.folder import write_secret
from pdserve.net.operator_client import AdminClient

NAMES = {Role.PREFILL: "chat-prefill", Role.DECODE: "chat-decode"}


class KubeStage:
    """Begins with the ready replicas prefill-0 and decode-0."""

    def __init__(
        self,
        kube: KubeCluster,
        client: Client,
        router: Router,
        operator: AdminClient,
        secret: Path,
        hole: socket.socket,
    ) -> None:
        self.kube = kube
        self.router = router
        self._client = client
        self._operator = operator
        self._secret = secret
        self._hole = hole
        self.actuator = self.another()

    def another(self, timeout_s: float = 20.0) -> PodActuator:
        prefill, decode = (ScaleTarget(name=name) for name in NAMES.values())
        settings = Settings(namespace=self.kube.namespace, prefill=prefill, decode=decode, timeout_s=timeout_s)
        return PodActuator(self._client, self._operator, settings)

    @property
    def roles(self) -> dict[str, Role]:
        by_pod = {pod.metadata.name: name for name in self.names for pod in [self.found(name)] if pod}
        return {by_pod[pod]: role for pod, role in self.router.roles.items()}

    @property
    def names(self) -> list[str]:
        return [held.name for role in NAMES for held in self.actuator.workload(role).listed()]

    def found(self, name: str) -> Any:  # noqa: ANN401
        return next((pod for role in NAMES if (pod := self.actuator.workload(role).pod(name))), None)

    async def pod(self, name: str) -> str:
        """Return the name of a replica's pod, once it has one."""
        async with asyncio.timeout(30):
            while True:
                for held in await self.actuator.observe():
                    if held.name == name and held.worker_id:
                        return held.worker_id

    async def make_ready(self, name: str) -> None:
        pod = await self.pod(name)
        await self.kube.set_status(pod, ready=True)
        self.router.ready[pod] = 1

    async def kill(self, name: str) -> None:
        pod = await self.pod(name)
        await self.kube.set_status(pod, ready=False)
        del self.router.ready[pod]

    async def until_gone(self, name: str) -> None:
        async with asyncio.timeout(30):
            while True:
                replicas = {held.name: held for held in await self.actuator.observe()}
                if name not in replicas:
                    return
                if replicas[name].state is State.DRAINING:
                    await self.finish()

    async def finish(self) -> None:
        """Let all pods go that are deleted."""
        for pod in await self.kube.pods():
            if "deletionTimestamp" in pod["metadata"]:
                await self.kube.let_go(pod["metadata"]["name"])

    def let_drains_last(self) -> None:
        pass  # each does, until `finish`

    async def fall_silent(self) -> None:
        address = "{}:{}".format(*self._hole.getsockname())
        actuator = self.actuator
        actuator._client._api.configuration.host = f"http://{address}"
        actuator._router = AdminClient(address, self._secret)
        actuator._settings = actuator._settings.model_copy(update={"timeout_s": 0.2})

    async def close(self) -> None:
        self._hole.close()


@asynccontextmanager
async def kube_stage(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[KubeStage]:
    router, secret = Router(), write_secret(tmp_path)
    async with serving(router, secret) as address, Client.connected() as client:
        for name in NAMES.values():
            await kube.make_deployment(name)
        hole = socket.create_server(("127.0.0.1", 0))  # that takes whatever comes, and answers nothing
        stage = KubeStage(kube, client, router, AdminClient(address, secret), secret, hole)
        await stage.actuator.observe()
        for role in NAMES:
            await stage.actuator.add(f"{role.value}-0", role)
            await stage.make_ready(f"{role.value}-0")
        await stage.actuator.observe()
        yield stage
        await stage.close()
