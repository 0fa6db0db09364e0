"""A simulated cluster whose workers come, drain, change roles and slow down while it serves.

A replica serves after its start-up time. It is paid for from the order to start it until its worker has left.
"""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.autoscaler.decisions import Action, ActuatorError, Add, Drain, Flip
from pdserve.autoscaler.observation import Replica, State, sequences_of
from pdserve.base.ids import WorkerId
from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value
from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.worker import Shape, SimWorker
from pdserve.measure.outcomes import Objective
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile
from pdserve.router.requests import events as router_events
from pdserve.router.requests.core import RouterCore
from pdserve.worker.messages import Load


@value
class Sizes:
    """Replicas of each pool from a moment on."""

    at_s: float
    counts: Mapping[State, Mapping[Role, int]]

    def count(self, role: Role, *states: State) -> int:
        """Return how many replicas of a pool are in one of these states; without any named, all."""
        return sum(self.counts[state][role] for state in states or State)


class Fleet(SimCluster):
    """A cluster with one router under the goodput policy. Carries out orders, and notes how many replicas were there.

    A repeated order changes nothing.
    """

    def __init__(
        self, profile: Profile, shape: Shape, workload: Workload, objective: Objective, startup_s: Mapping[Role, float]
    ) -> None:
        super().__init__(profile, shape, "goodput", workload, objective)
        self._startup_s = startup_s
        self._slowness = 1.0  # times that steps take as long as the profile says
        self._members = {view.name: Replica(view.name, view.role, State.READY, 0.0) for view in self.router.workers}
        self.history: list[Sizes] = []
        self._note()

    @property
    def router(self) -> RouterCore:
        return self.routers[0]

    def carry_out(self, action: Action) -> None:
        """Carry out an order; ActuatorError where that is not possible."""
        match action:
            case Add(name, role):
                self.add(name, role)
            case Drain(name):
                self.drain(name)
            case Flip(name, role):
                self.flip(name, role)

    def add(self, name: str, role: Role) -> None:
        """Let a worker attach that can serve at once, after its start-up time."""
        if name not in self._members:
            self._enter(Replica(name, role, State.STARTING, self.clock.now_s()))
            self.clock.at(self.clock.now_s() + self._startup_s[role], self._started, name)

    def drain(self, name: str) -> None:
        """Place nothing more on a worker, which leaves once its answers have ended or moved.

        A worker that has not started leaves at once.
        """
        member = self._members.get(name)
        if member is None or member.state is State.DRAINING:
            return
        if member.state is State.STARTING:
            self._forget(name)
            return
        self._enter(replace(member, state=State.DRAINING, since_s=self.clock.now_s()))
        worker = self._worker(name)
        worker.reports = True
        worker.on_drained = self._leave
        self._tell(router_events.DrainAsked(worker.link))

    def flip(self, name: str, role: Role) -> None:
        """Give a worker another role; ActuatorError where it cannot take it."""
        member = self._members.get(name)
        if member is None or member.state is not State.READY:
            raise ActuatorError(f"{name} does not serve")
        worker = self._worker(name)
        view = self.router.workers.known(worker.link)
        if view.role is role:
            return
        if why := self.router.workers.role_refusal(view, role, force=False):
            raise ActuatorError(why)
        if role is Role.PREFILL:
            worker.reports = True  # what it decodes moves
        self._tell(router_events.RoleAsked(worker.link, role, view.registration.role_epoch + 1))

    def slow_down(self, factor: float) -> None:
        """Let every step from the next ones on take so many times as long as the profile says."""
        self._slowness = factor
        for worker in self.workers:
            worker.slow_down(factor)

    def replicas(self) -> tuple[Replica, ...]:
        """Return all replicas, with the load that each worker reports in its heartbeat."""
        self._take_roles()
        loads = {worker.peer.worker_id: worker.core.load() for worker in self.workers}
        return tuple(_loaded(member, loads.get(WorkerId(member.name))) for member in self._members.values())

    def _started(self, name: str) -> None:
        member = self._members.get(name)
        if member is None:
            return  # it was given up meanwhile
        others = list(self.workers)
        worker = self._attach(name, member.role)
        worker.slow_down(self._slowness)
        for other in others:
            self._measure_pair(worker, other)
            self._measure_pair(other, worker)
        self._enter(replace(member, state=State.READY, since_s=self.clock.now_s()))

    def _leave(self, worker: SimWorker) -> None:
        """Let a worker's process end; the router proves that to all others."""
        del self._workers[worker.link]
        self._tell(router_events.LinkLost(worker.link, "drained"))
        self._tell(router_events.ProcessEnded(worker.peer, from_outside=True))
        self._forget(worker.peer.worker_id)

    def _tell(self, event: router_events.Event) -> None:
        for router in self._routers.values():
            self._post(router, event)

    def _worker(self, name: str) -> SimWorker:
        return next(worker for worker in self.workers if worker.peer.worker_id == name)

    # ---- how many there are

    def _enter(self, member: Replica) -> None:
        self._members[member.name] = member
        self._note()

    def _forget(self, name: str) -> None:
        del self._members[name]
        self._note()

    def _take_roles(self) -> None:
        """Note the roles that workers have taken."""
        for view in self.router.workers:
            member = self._members[view.name]
            if member.role is not view.role:
                self._enter(replace(member, role=view.role))

    def _note(self) -> None:
        """Note how many replicas there are from now on."""
        counts = {state: dict.fromkeys(POOLS, 0) for state in State}
        for member in self._members.values():
            counts[member.state][member.role] += 1
        self.history.append(Sizes(self.clock.now_s(), counts))


def _loaded(member: Replica, load: Load | None) -> Replica:
    if load is None:
        return member
    return replace(
        member,
        num_sequences=sequences_of(member.role, load.num_running, load.num_waiting),
        waiting_tokens=load.waiting_tokens,
        kv_tokens=load.kv_tokens,
    )
