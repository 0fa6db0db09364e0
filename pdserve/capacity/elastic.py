"""A simulated cluster whose workers come, drain, change roles and slow down while it serves."""

from collections.abc import Callable, Iterable

from pdserve.capacity.building import Builder
from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.worker import SimWorker
from pdserve.errors import CommandError
from pdserve.measure.outcomes import Outcome
from pdserve.roles import Role
from pdserve.router import events as router_events
from pdserve.router.core import RouterCore
from pdserve.virtual_time import VirtualClock


class ElasticCluster(SimCluster):
    """Does what operators and launchers do to a cluster. It has one router."""

    slowness = 1.0  # times that steps take as long as the profile says
    on_left: Callable[[str], None] | None = None  # called with the name of each worker that has drained

    @property
    def builder(self) -> Builder:
        return self._builder

    @property
    def outcomes(self) -> Iterable[Outcome]:
        return self._outcomes.values()

    @property
    def clock(self) -> VirtualClock:
        return self._clock

    @property
    def router(self) -> RouterCore:
        return next(iter(self._routers.values())).core

    def join(self, name: str, role: Role) -> None:
        """Let a worker attach that can serve at once. No other one has its name."""
        others = list(self._workers.values())
        worker = self._attach(name, role)
        worker.slow_down(self.slowness)
        for other in others:
            self._measure_pair(worker, other)
            self._measure_pair(other, worker)

    def drain(self, name: str) -> None:
        """Place nothing more on a worker. It leaves once its answers have ended, or have moved."""
        worker = self._worker(name)
        worker.step_singly()
        worker.on_drained = self._leave
        self._order(router_events.DrainAsked(worker.link))

    def flip(self, name: str, role: Role) -> None:
        """Give a worker another role; CommandError where it cannot take it."""
        worker = self._worker(name)
        view = self.router.workers.known(worker.link)
        if why := self.router.workers.role_refusal(view, role, force=False):
            raise CommandError(why)
        if role is Role.PREFILL:
            worker.step_singly()  # what it decodes moves
        else:
            worker.leaps = True
        self._order(router_events.RoleAsked(worker.link, role, view.registration.role_epoch + 1))

    def slow_down(self, factor: float) -> None:
        """Let every step from the next ones on take so many times as long as the profile says."""
        self.slowness = factor
        for worker in self._workers.values():
            worker.slow_down(factor)

    def _order(self, order: router_events.DrainAsked | router_events.RoleAsked) -> None:
        for router in self._routers.values():
            self._post(router, order)

    def _worker(self, name: str) -> SimWorker:
        return next(worker for worker in self._workers.values() if worker.peer.worker_id == name)

    def _leave(self, worker: SimWorker) -> None:
        """Let a worker's process end; the router proves that to all others."""
        del self._workers[worker.link]
        self._wires.remove(worker)
        for router in self._routers.values():
            self._post(router, router_events.LinkLost(worker.link, "drained"))
            self._post(router, router_events.ProcessEnded(*worker.peer, from_outside=True))
        if self.on_left is not None:
            self.on_left(worker.peer.worker_id)
