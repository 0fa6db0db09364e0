"""Kubernetes as actuator: orders change the scale of two deployments, whose pods are the replicas.

A pod belongs to the deployment that made it, whatever its role is later. Pools count roles; an order to drain a pod
makes its own deployment smaller.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pdserve.autoscaler.actuator import Actuator, give_role, ordering
from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import Listed
from pdserve.autoscaler.schema import KubernetesActuator as Settings
from pdserve.autoscaler.workload import MARK, Workload
from pdserve.base.clock import Clock
from pdserve.base.roles import Role
from pdserve.kubernetes.client import ApiError, Backoff, Client, RefusedError
from pdserve.kubernetes.election import Leadership
from pdserve.kubernetes.objects import DELETION_COST, ROLE_LABEL, Anything, Pod, Scale, ScaleSpec
from pdserve.kubernetes.watcher import PodWatcher, Routers
from pdserve.net.operator_client import AdminClient
from pdserve.protocol.link import ROLES

logger = logging.getLogger(__name__)

CONFLICT = 409


class PodActuator:
    """Replicas are pods of two deployments."""

    def __init__(self, client: Client, router: AdminClient, settings: Settings) -> None:
        self._client = client
        self._router = router
        self._settings = settings
        names = {Role.PREFILL: settings.prefill.name, Role.DECODE: settings.decode.name}
        self._workloads = {role: Workload(name, role) for role, name in names.items()}
        self._locks = {name: asyncio.Lock() for name in names.values()}  # one order changes a workload at a time
        self._pods_path = f"/api/v1/namespaces/{settings.namespace}/pods"

    def workload(self, role: Role) -> Workload:
        """Return the workload whose pods start with a role."""
        return self._workloads[Role.DECODE if role is Role.MIXED else role]

    async def observe(self) -> Sequence[Listed]:
        """Return all pods, and those that deployments have yet to make."""
        async with self._asking("list the pods"):
            for workload in self._workloads.values():
                async with self._locks[workload.name]:
                    scale = await self._scale(workload)
                    pods, version = await self._client.pods(self._pods_path, scale.status.selector)
                    workload.see(scale, pods, version, asyncio.get_running_loop().time())
        with suppress(ActuatorError):  # labels follow later
            async with self._asking("label the pods"):
                await self._label()
        return [listed for workload in self._workloads.values() for listed in workload.listed()]

    async def add(self, name: str, role: Role) -> None:
        """Make a deployment greater by one, unless there is a replica of this name."""
        workload = self.workload(role)
        async with self._asking(f"add {name}"), self._locks[workload.name]:
            if any(each.pod(name) for each in self._workloads.values() if each is not workload):
                return
            if workload.begin_add(name):
                try:
                    await self._rescale(workload, 1)
                except (RefusedError, ActuatorError) as error:
                    if not isinstance(error, RefusedError) or error.status < 500:
                        workload.failed_to_add(name)
                    raise
                workload.added(name)

    async def drain(self, name: str) -> None:
        """Make a replica's deployment smaller by one, and mark the replica's pod as the first to be removed.

        Its process gets SIGTERM then, and drains.
        """
        for workload in self._workloads.values():
            async with self._asking(f"drain {name}"), self._locks[workload.name]:
                if workload.pod(name) is not None:
                    pods, _ = await self._client.pods(self._pods_path, workload.selector)
                    pod = workload.begin_drain(name, pods)
                    if pod is None:
                        return
                    for stale in workload.stale_marks():
                        await self._patch(stale, {"annotations": {DELETION_COST: None}})
                    await self._patch(pod, {"annotations": {DELETION_COST: MARK}})
                elif workload.is_coming(name):
                    pod = None
                else:
                    continue
                await self._rescale(workload, -1)
                workload.drained(name, pod)
                return

    async def flip(self, name: str, role: Role) -> None:
        """Give a replica another role while it serves; its pod's label follows."""
        pod = next((found for workload in self._workloads.values() if (found := workload.pod(name))), None)
        await give_role(self._router, name if pod is None else pod.metadata.name, role, self._settings.timeout_s)
        if pod is not None:
            with suppress(ActuatorError):  # the role is given; the label follows when it is seen next
                async with self._asking(f"label {name}"):
                    await self._patch(pod, {"labels": {ROLE_LABEL: role.value}})

    async def _label(self) -> None:
        """Let labels follow the roles that a router reports."""
        status = await self._router.status()
        roles = {w.registration.worker_id: ROLES.get(w.registration.role) for w in status.workers}
        for workload in self._workloads.values():
            for pod in workload.pods:
                role = roles.get(pod.metadata.name)
                if role is not None and pod.metadata.labels.get(ROLE_LABEL) != role.value:
                    await self._patch(pod, {"labels": {ROLE_LABEL: role.value}})

    async def _rescale(self, workload: Workload, change: int) -> None:
        """Change a size by one from the size that was observed."""
        backoff = Backoff()
        while True:
            scale = await self._scale(workload)
            size = workload.target(scale.spec.replicas, change)
            if size is None:
                return
            body = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": scale.metadata}
            body["spec"] = ScaleSpec(replicas=size)
            try:
                await self._client.replace(self._scale_path(workload), body, Scale)
                return
            except RefusedError as error:
                if error.status != CONFLICT:
                    raise
                await backoff.wait()

    async def _scale(self, workload: Workload) -> Scale:
        scale = await self._client.get(self._scale_path(workload), Scale)
        if not scale.status.selector:
            raise ActuatorError(f"{workload.name}: its scale names no selector")
        return scale

    def _scale_path(self, workload: Workload) -> str:
        return f"/apis/apps/v1/namespaces/{self._settings.namespace}/deployments/{workload.name}/scale"

    async def _patch(self, pod: Pod, metadata: dict[str, object]) -> None:
        path = f"{self._pods_path}/{pod.metadata.name}"
        await self._client.patch(path, {"metadata": {"uid": pod.metadata.uid, **metadata}})

    def _asking(self, what: str) -> AbstractAsyncContextManager[None]:
        return ordering(what, self._settings.timeout_s, ApiError)


REASONS = {"add": "ScalingUp", "drain": "ScalingDown", "flip": "ChangingRole"}
FAILED = "OrderFailed"
BURST, EVERY_S = 20, 5.0
SEND_S = 10.0
MAX_NOTE = 1024  # characters that the API takes


class Events:
    """Events of deployments, so that `kubectl describe` shows what was decided and why.

    They are for people to read. A burst of 20 is sent at once, then one event every 5 s. When more are waiting, the
    oldest are dropped. Events that the API refuses are dropped too.
    """

    def __init__(self, client: Client, namespace: str, instance: str) -> None:
        self._client = client
        self._namespace = namespace
        self._instance = instance
        self._waiting: deque[dict[str, Any]] = deque(maxlen=BURST)
        self._news = asyncio.Event()

    def report(self, workload: Workload, reason: str, note: str) -> None:
        """Have an event sent. `reason`: one word in CamelCase."""
        about = {"apiVersion": "apps/v1", "kind": "Deployment", "namespace": self._namespace}
        self._waiting.append(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"name": f"{workload.name}.{uuid4().hex[:16]}", "namespace": self._namespace},
                "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "reportingController": "pdserve.dev/autoscaler",
                "reportingInstance": self._instance[:128],
                "action": reason,
                "reason": reason,
                "type": "Warning" if reason == FAILED else "Normal",
                "note": note[:MAX_NOTE],
                "regarding": {**about, "name": workload.name, "uid": workload.uid},
            }
        )
        self._news.set()

    async def run(self) -> None:
        """Go on until cancelled."""
        loop = asyncio.get_running_loop()
        paid_s = loop.time()  # each event costs EVERY_S; up to BURST of them are sent before they are paid for
        while True:
            self._news.clear()
            while self._waiting:
                paid_s = max(paid_s, loop.time()) + EVERY_S
                await asyncio.sleep(paid_s - BURST * EVERY_S - loop.time())
                await self._send(self._waiting.popleft())
            await self._news.wait()

    async def _send(self, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await self._client.create(f"/apis/events.k8s.io/v1/namespaces/{self._namespace}/events", body, Anything)
        except (ApiError, TimeoutError) as error:
            logger.warning("an event of %s was not sent: %s", body["regarding"]["name"], error or "no answer")


class InCluster:
    """What an autoscaler does on Kubernetes beside its loop.

    It lets the loop run only while it leads, and shows orders as events of the workloads. It reports processes that
    have ended, whether it leads or not.
    """

    def __init__(
        self, client: Client, actuator: Actuator, settings: Settings | None, routers: Routers, clock: Clock
    ) -> None:
        """`settings`: of the actuator; None where it only publishes, and is the only one."""
        me = f"{socket.gethostname()}_{uuid4().hex[:12]}"
        namespace = client.namespace if settings is None else settings.namespace
        self._actuator = actuator
        self._events = Events(client, namespace, me)
        self.watcher = PodWatcher(client, namespace, routers, clock)
        self._turns = None if settings is None else Leadership(client, namespace, settings.lease, me, clock)

    @property
    def leads(self) -> bool:
        """Whether this autoscaler is the one that decides."""
        return self._turns is None or self._turns.leads

    def announce(self, pool: Role, verb: str, text: str) -> None:
        """Show an order, or why one failed, as an event of the pool's workload."""
        if isinstance(self._actuator, PodActuator):
            self._events.report(self._actuator.workload(pool), REASONS.get(verb, FAILED), text)

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
        """Do the autoscaler's work whenever it leads, and the rest all the time, until the work has ended."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(each) for each in (self._events.run(), self.watcher.run())]
            await (work() if self._turns is None else self._turns.run(work, stop))
            for task in beside:
                task.cancel()
