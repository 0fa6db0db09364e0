"""Ends of pods' processes reach every router, whatever becomes of the watch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from admin_stub import Router, serving
from kube_api import Fault, KubeApi
from kube_cluster import FINALIZER, REAL, KubeCluster

from pdserve.base.clock import MonotonicClock
from pdserve.kubernetes.client import Client
from pdserve.kubernetes.objects import WATCHER
from pdserve.kubernetes.watcher import PodWatcher
from pdserve.launch.folder import write_secret
from pdserve.net.operator_client import AdminClient

double_only = pytest.mark.skipif(bool(REAL), reason="a fault, or what the server was asked")
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class Watching:
    """A namespace, its routers, and a watcher."""

    def __init__(self, kube: KubeCluster, watcher: PodWatcher, secret: Path, stack: AsyncExitStack) -> None:
        self.kube = kube
        self.watcher = watcher
        self.routers: list[Router] = []
        self.operators: list[AdminClient] = []
        self._secret = secret
        self._stack = stack

    async def add_router(self) -> Router:
        router = Router()
        address = await self._stack.enter_async_context(serving(router, self._secret))
        self.routers.append(router)
        self.operators.append(AdminClient(address, self._secret))
        return router

    @property
    def double(self) -> KubeApi:
        assert self.kube.double is not None
        return self.kube.double

    async def start(self, name: str, incarnation: int, node: str | None = None) -> str:
        """Start a pod's worker, which attaches; return the pod's uid."""
        containers = [{"name": "worker", "image": "registry.invalid/worker"}]
        spec = {"schedulerName": "pdserve-test", "containers": containers, "terminationGracePeriodSeconds": 0}
        spec |= {"nodeName": node} if node is not None else {}
        meta = {"name": name, "finalizers": [FINALIZER]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": "Pending"}}
        pod = await self.kube.ask("POST", self.kube.path("pods"), body)
        for router in self.routers:
            router.launched[name] = pod["metadata"]["uid"]
            router.ready[name] = incarnation
        uid: str = pod["metadata"]["uid"]
        return uid

    async def terminate(self, name: str, incarnation: int, code: int = 0) -> None:
        how = {"exitCode": code, "reason": "Completed", "message": f"{incarnation}\n"}
        status = {"name": "worker", "state": {"terminated": how}, "ready": False, "restartCount": 0, "image": "worker"}
        status["imageID"] = ""
        await self.kube.set_status(name, ready=False, containerStatuses=[status])

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.kube.until(holds)

    def known(self, uid: str) -> bool:
        pod: Any = self.watcher._ends._pods.get(uid)
        return bool(pod and pod.running)


@pytest.fixture
async def watching(kube: KubeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watching]:
    for name, quick_s in (("LOOK_S", 0.05), ("NODE_S", 0.02)):
        monkeypatch.setattr(f"pdserve.kubernetes.watcher.{name}", quick_s)
    monkeypatch.setattr("pdserve.kubernetes.client.MAX_WAIT_S", 0.2)
    monkeypatch.setattr("pdserve.kubernetes.client.REPEAT_S", 0.2)
    monkeypatch.setattr("pdserve.kubernetes.ends.MARGIN_S", 0.2)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client.connected())

        async def routers() -> list[AdminClient]:
            return list(watching.operators)

        watcher = PodWatcher(client, kube.namespace, routers, MonotonicClock())
        watching = Watching(kube, watcher, write_secret(tmp_path), stack)
        await watching.add_router()
        task = asyncio.create_task(watcher.run())
        yield watching
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_the_end_of_a_container_reaches_every_router_and_one_that_is_found_later(watching: Watching) -> None:
    await watching.add_router()
    await watching.start("decode-a", 5)
    await watching.terminate("decode-a", 5, code=1)
    await watching.until(lambda: all(("decode-a", 5) in router.gone for router in watching.routers))
    assert [router.from_outside[5] for router in watching.routers] == [False, False]
    later = await watching.add_router()
    await watching.until(lambda: ("decode-a", 5) in later.gone)


async def test_a_router_that_did_not_answer_gets_the_report_when_it_does(watching: Watching) -> None:
    deaf = AdminClient("127.0.0.1:9", watching._secret)
    watching.operators.insert(0, deaf)
    await watching.start("decode-a", 5)
    await watching.terminate("decode-a", 5)
    await watching.until(lambda: ("decode-a", 5) in watching.routers[0].gone)


@double_only
async def test_no_end_is_missed_whatever_becomes_of_the_watch(watching: Watching) -> None:
    (router,) = watching.routers
    api = watching.double
    troubles: list[Callable[[], None]] = [
        lambda: None,
        lambda: api.faults.append(Fault("WATCH", "/pods", status=429, headers={"Retry-After": "0"}, times=2)),
        lambda: api.faults.append(Fault("WATCH", "/pods", status=500, times=2)),
        lambda: api.faults.append(Fault("ANY", "/pods", lose="request", times=3)),
        api.expire,
    ]
    for number, trouble in enumerate(troubles, 1):
        await watching.until(lambda: api.num_watches == 1)
        name = f"decode-{number}"
        await watching.start(name, number)
        trouble()
        await api.cut_watches()
        for item in api.items("pods"):
            if item["metadata"]["name"] == name:
                how = {"exitCode": 137, "message": str(number)}
                item["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": how}}]
                api.store("pods", item)
        if number == len(troubles):
            api.expire()  # the change itself cannot be seen any more
        await watching.until(lambda gone=(name, number): gone in router.gone)
    assert len(router.gone) == len(set(router.gone)) == len(troubles)


@double_only
async def test_ends_are_seen_after_the_api_was_restored_from_a_backup(watching: Watching) -> None:
    (router,), api = watching.routers, watching.double
    for number in range(1, 20):  # versions that the restored API has not reached again when the test ends
        await watching.start(f"decode-{number}", number)
    await watching.until(lambda: api.num_watches == 1)
    api.set_back(2)
    await api.cut_watches()
    await watching.terminate("decode-5", 5)
    await watching.until(lambda: router.gone == [("decode-5", 5)])


@pytest.mark.long
@double_only
async def test_a_list_that_fails_once_the_watch_has_failed_is_warned_of_once(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    (router,), api = watching.routers, watching.double
    await watching.until(lambda: api.num_watches == 1)
    await watching.start("decode-a", 5)
    for status in (503, 429):
        caplog.clear()
        failing = Fault("GET", "/pods", status=status, times=1_000_000)
        api.faults.append(failing)
        api.expire()
        await api.cut_watches()
        await watching.until(lambda failing=failing: failing.times <= 1_000_000 - 40)
        warnings = [record.getMessage() for record in caplog.records if f"fault {status}" in record.getMessage()]
        assert len(warnings) == 1, warnings
        api.faults.clear()
        await watching.until(lambda: api.num_watches == 1)
    await watching.terminate("decode-a", 5)
    await watching.until(lambda: router.gone == [("decode-a", 5)])


class Node:
    """A node without a kubelet, which is ready."""

    def __init__(self, kube: KubeCluster) -> None:
        self._kube = kube
        self.name = f"node-of-{kube.namespace}"
        self.path = f"/api/v1/nodes/{self.name}"
        self._renewals = 0

    async def make(self) -> None:
        meta, ready = {"name": self.name}, {"conditions": [{"type": "Ready", "status": "True"}]}
        await self._kube.ask(
            "POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta, "status": ready}
        )
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta}
        await self._kube.ask("POST", LEASES, {**lease, "spec": self._renewal()})

    async def renew(self) -> None:
        await self._kube.patch(f"{LEASES}/{self.name}", {"spec": self._renewal()})

    def _renewal(self) -> dict[str, str]:
        self._renewals += 1
        return {"renewTime": f"2026-01-01T00:00:00.{self._renewals:06}Z"}

    async def remove(self) -> None:
        await self._kube.ask("DELETE", f"{LEASES}/{self.name}")
        await self._kube.ask("DELETE", self.path)


@pytest.fixture
async def node(kube: KubeCluster) -> AsyncIterator[Node]:
    node = Node(kube)
    await node.make()
    yield node
    await node.remove()


async def lose_a_pod(watching: Watching, node: Node) -> None:
    """Have a pod of a node that is ready removed, without a word of its process."""
    kube, path = watching.kube, watching.kube.path("pods", "decode-a")
    uid = await watching.start("decode-a", 5, node.name)
    await watching.until(lambda: watching.known(uid))
    await kube.ask("DELETE", path, {"gracePeriodSeconds": 0})
    await kube.let_go("decode-a")
    await watching.until(lambda: node.name in watching.watcher._ends._nodes)


async def test_a_pod_forced_off_a_lost_node_proves_nothing_until_the_node_answers(
    watching: Watching, node: Node
) -> None:
    (router,), kube = watching.routers, watching.kube
    await lose_a_pod(watching, node)
    before = len(router.gone)
    await kube.until(_so_often(100))
    assert (before, router.gone) == (0, [])
    async with asyncio.timeout(20):
        while not router.gone:
            await node.renew()
    assert router.gone == [("decode-a", 5)]


@double_only
async def test_what_is_asked_is_what_the_table_of_rights_says(watching: Watching, node: Node) -> None:
    await lose_a_pod(watching, node)
    where = {"*": "", "": watching.kube.namespace}
    rights = {
        (verb, right.group, right.resource, where.get(right.namespace, right.namespace))
        for right in WATCHER
        for verb in right.verbs
    }
    calls = watching.double.calls
    await watching.until(lambda: rights <= {(call.verb, call.group, call.resource, call.namespace) for call in calls})


async def test_the_taint_of_a_machine_that_is_off_proves_the_end_once_its_node_is_not_ready(
    watching: Watching, node: Node
) -> None:
    (router,), kube = watching.routers, watching.kube
    await lose_a_pod(watching, node)
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    await kube.patch(node.path, {"spec": {"taints": [taint]}})
    await kube.until(_so_often(100))
    assert router.gone == []
    await kube.patch(f"{node.path}/status", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
    await watching.until(lambda: router.gone == [("decode-a", 5)])


async def test_a_router_that_takes_long_keeps_what_it_has_got(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.kubernetes.watcher.CALL_S", 0.3)
    (router,) = watching.routers
    router.hangs_at = 6
    for number, name in ((5, "decode-a"), (6, "decode-b"), (7, "decode-c")):
        await watching.start(name, number)
        await watching.terminate(name, number)
    await watching.until(lambda: router.num_hung == 3)
    router.hangs_at = 0
    await watching.until(lambda: len(router.gone) >= 3)
    assert sorted(number for _, number in router.gone) == [5, 6, 7]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(warnings) <= 2, "the same cause was logged again"  # gRPC or our own limit may be the first to end


def _so_often(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is None
