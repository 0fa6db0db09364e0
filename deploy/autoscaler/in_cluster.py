"""What an autoscaler does beside its decisions where its cluster runs on Kubernetes.

It decides only while it leads, shows its orders as events of the workloads, and reports processes that have ended,
whether it leads or not.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import uuid4

from pdserve.autoscaler.actuator import Actuator
from pdserve.autoscaler.actuators import KubernetesActuator as Settings
from pdserve.autoscaler.kubernetes import PodActuator
from pdserve.clock import Clock
from pdserve.kubernetes.client import Client
from pdserve.kubernetes.election import Leadership
from pdserve.kubernetes.events import Events, Subject
from pdserve.kubernetes.watcher import PodWatcher, Routers
from pdserve.roles import Role

REASONS = {"add": "ScalingUp", "drain": "ScalingDown", "flip": "ChangingRole"}
FAILED = "OrderFailed"


class InCluster:
    """The autoscaler's part beside its loop."""

    def __init__(
        self, client: Client, actuator: Actuator, settings: Settings | None, routers: Routers, clock: Clock
    ) -> None:
        """`settings`: of the actuator; None where it only publishes, and is the only one."""
        me = f"{socket.gethostname()}_{uuid4().hex[:12]}"
        namespace = client.namespace if settings is None else settings.namespace
        self._actuator = actuator
        self._events = Events(client, "pdserve.dev/autoscaler", me)
        self._namespace = namespace
        self.watcher = PodWatcher(client, namespace, routers, clock)
        self._turns = None if settings is None else Leadership(client, namespace, settings.lease, me, clock)

    @property
    def leads(self) -> bool:
        """Whether this autoscaler is the one that decides."""
        return self._turns is None or self._turns.leads

    def announce(self, pool: Role, verb: str, text: str) -> None:
        """Show an order, or why one failed, as an event of the pool's workload."""
        if isinstance(self._actuator, PodActuator):
            workload = self._actuator.workload(pool)
            subject = Subject("apps/v1", "Deployment", self._namespace, workload.name, workload.uid)
            reason = REASONS.get(verb, FAILED)
            self._events.report(subject, reason, text, is_warning=reason == FAILED)

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
        """Do the autoscaler's work whenever it leads, and the rest all the time, until the work has ended."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(each) for each in (self._events.run(), self.watcher.run())]
            await (work() if self._turns is None else self._turns.run(work, stop))
            for task in beside:
                task.cancel()
