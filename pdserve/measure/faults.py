"""Kills or freezes workers of a cluster on this machine, one at a time, and sees how soon its router notices."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.launch.folder import ClusterState, ProcessState
from pdserve.proto.v1 import admin_pb2 as admin


@dataclass(frozen=True, slots=True)
class FaultPlan:
    every_s: float
    freeze_s: float | None = None  # None: kill; otherwise freeze for that long
    seed: int = 0


@dataclass(slots=True)
class Fault:
    name: str
    incarnation: int
    at_s: float
    was_attached: bool
    noticed_s: float | None = None  # after the fault, when the router no longer counted on the worker


class FaultInjector:
    """Injects faults. `state` returns the processes; `see` is to be called with each status of the router."""

    def __init__(self, state: Callable[[], ClusterState], plan: FaultPlan, clock: Clock) -> None:
        self.faults: list[Fault] = []
        self._state = state
        self._plan = plan
        self._clock = clock
        self._rng = random.Random(f"faults {plan.seed}")
        self._attached: set[tuple[str, int]] = set()
        self._ready: set[str] = set()

    def see(self, status: admin.ClusterStatus) -> None:
        """Note which workers the router counts on."""
        self._attached = {(w.registration.worker_id, w.registration.incarnation) for w in status.workers}
        self._ready = {w.registration.worker_id for w in status.workers if w.registration.ready}
        for fault in self.faults:
            if fault.was_attached and fault.noticed_s is None and (fault.name, fault.incarnation) not in self._attached:
                fault.noticed_s = self._clock.now_s() - fault.at_s

    async def run(self) -> None:
        """Kill or freeze a worker every so often, until cancelled; a frozen one is thawed then too."""
        while True:
            await asyncio.sleep(self._plan.every_s)
            victim = self._victim()
            if victim is not None:
                await self._hit(victim)

    def _victim(self) -> ProcessState | None:
        """Return one of the workers that are ready; while there is none, any that runs."""
        workers = [p for p in self._state().processes if p.role != "router" and p.pid is not None]
        serving = [worker for worker in workers if worker.name in self._ready]
        return self._rng.choice(serving or workers) if workers else None

    async def _hit(self, victim: ProcessState) -> None:
        is_attached = (victim.name, victim.incarnation) in self._attached
        self.faults.append(Fault(victim.name, victim.incarnation, self._clock.now_s(), is_attached))
        if self._plan.freeze_s is None:
            self._signal(victim, signal.SIGKILL)
            return
        self._signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._plan.freeze_s)
        finally:
            self._signal(victim, signal.SIGCONT)

    @staticmethod
    def _signal(victim: ProcessState, number: signal.Signals) -> None:
        if victim.pid is None:
            return
        try:
            os.kill(victim.pid, number)
        except ProcessLookupError:
            return  # it ended by itself
