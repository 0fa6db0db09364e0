"""The launcher of a machine as an actuator, with workers that only sleep."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from actuator_suite import ActuatorSuite
from admin_stub import Router, serving
from fault_proxy import FaultProxy, Faults, fault_proxies
from sleeping_cluster import SLEEPER, SleepingCluster, deaf_workers, let_workers_run, sleeping_cluster

from pdserve.autoscaler.actuator import LocalActuator
from pdserve.base.roles import Role
from pdserve.net import rpc
from pdserve.net.operator_client import AdminClient, LauncherClient

pytestmark = pytest.mark.slow


class LocalStage:
    def __init__(self, cluster: SleepingCluster, router: Router, paths: dict[str, FaultProxy]) -> None:
        self._cluster = cluster
        self._router = router
        self._paths = paths
        self._launcher = LauncherClient(paths["launcher"].address, cluster.secret_file)
        self._operator = AdminClient(paths["router"].address, cluster.secret_file)
        self._stack = ExitStack()
        self.actuator = self._actuator(timeout_s=20.0)

    def _actuator(self, timeout_s: float) -> LocalActuator:
        return LocalActuator(self._launcher, self._operator, timeout_s)

    @property
    def roles(self) -> dict[str, Role]:
        return self._router.roles

    async def make_ready(self, name: str) -> None:
        await self._cluster.record.until(lambda: self._cluster.pid_of(name) is not None)
        self._cluster.ready.add(name)

    async def kill(self, name: str) -> None:
        pid, record = self._cluster.pid_of(name), self._cluster.record
        assert pid is not None
        os.kill(pid, 9)
        await record.until(lambda: any(exit_.spec.name == name for exit_ in record.exits))
        self._cluster.ready.discard(name)

    async def until_gone(self, name: str) -> None:
        processes = self._cluster.supervisor
        await self._cluster.record.until(lambda: all(process.name != name for process in processes.processes))

    def let_drains_last(self) -> None:
        self._stack.enter_context(deaf_workers())

    async def fall_silent(self) -> None:
        for path in self._paths.values():
            await asyncio.to_thread(path.set, Faults(blackhole=True))
        self.actuator = self._actuator(timeout_s=0.1)

    async def close(self) -> None:
        self._stack.close()


class TestLocalActuator(ActuatorSuite):
    @pytest.fixture
    async def stage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalStage]:
        let_workers_run(SLEEPER, monkeypatch)
        router = Router()
        router.ready = {"prefill-0": 1, "decode-0": 1}
        with fault_proxies("launcher", "router") as paths:
            async with (
                sleeping_cluster(tmp_path, max_workers=3) as cluster,
                serving(router, cluster.secret_file) as address_of_router,
            ):
                cluster.ready |= {"prefill-0", "decode-0"}
                addresses = {"launcher": cluster.address, "router": address_of_router}
                for name, address in addresses.items():
                    host, port = rpc.split_address(address)
                    paths[name].target = host, int(port)
                stage = LocalStage(cluster, router, paths)
                yield stage
                await stage.close()
