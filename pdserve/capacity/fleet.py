"""A simulated cluster whose workers come, drain, change roles and slow down while it serves, and its actuator.

A replica serves after its start-up time. It is paid for from the order to start it until its worker has left.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from pdserve.autoscaler.actuator import ActuatorError, State
from pdserve.autoscaler.decisions import Action, Add, Drain, Flip
from pdserve.autoscaler.observation import Replica, sequences_of
from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.worker import SimWorker
from pdserve.errors import CommandError
from pdserve.ids import WorkerId
from pdserve.roles import POOLS, Role
from pdserve.router import events as router_events
from pdserve.router.core import RouterCore
from pdserve.values import value
from pdserve.worker.messages import Load


@value
class Sizes:
    """Replicas of each pool from a moment on."""

    at_s: float
    counts: Mapping[State, Mapping[Role, int]]

    def count(self, role: Role, *states: State) -> int:
        """Return how many replicas of a pool are in one of these states; without any named, all."""
        return sum(self.counts[state][role] for state in states or State)


class ElasticCluster(SimCluster):
    """Does what operators and launchers do to a cluster. It has one router."""

    slowness = 1.0  # times that steps take as long as the profile says
    on_left: Callable[[str], None] | None = None  # called with the name of each worker that has drained

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
        self._tell(router_events.DrainAsked(worker.link))

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
        self._tell(router_events.RoleAsked(worker.link, role, view.registration.role_epoch + 1))

    def slow_down(self, factor: float) -> None:
        """Let every step from the next ones on take so many times as long as the profile says."""
        self.slowness = factor
        for worker in self._workers.values():
            worker.slow_down(factor)

    def _tell(self, event: router_events.Event) -> None:
        for router in self._routers.values():
            self._post(router, event)

    def _worker(self, name: str) -> SimWorker:
        return next(worker for worker in self._workers.values() if worker.peer.worker_id == name)

    def _leave(self, worker: SimWorker) -> None:
        """Let a worker's process end; the router proves that to all others."""
        del self._workers[worker.link]
        self._wires.remove(worker)
        self._tell(router_events.LinkLost(worker.link, "drained"))
        self._tell(router_events.ProcessEnded(*worker.peer, from_outside=True))
        if self.on_left is not None:
            self.on_left(worker.peer.worker_id)


class Fleet:
    """Starts, drains and flips the workers of a cluster, and notes how many there were when."""

    def __init__(self, cluster: ElasticCluster, startup_s: Mapping[Role, float]) -> None:
        """Take charge of the workers that the cluster begins with."""
        self._cluster = cluster
        self._clock = cluster.clock
        self._startup_s = startup_s
        self._members = {view.name: Replica(view.name, view.role, State.READY, 0.0) for view in cluster.router.workers}
        self.history: list[Sizes] = []
        cluster.on_left = self._left
        self._note()

    def carry_out(self, action: Action) -> None:
        """Carry out an order; ActuatorError where that is not possible. A repeated order changes nothing."""
        match action:
            case Add(name, role):
                self._add(name, role)
            case Drain(name):
                self._drain(name)
            case Flip(name, role):
                self._flip(name, role)

    def replicas(self) -> tuple[Replica, ...]:
        """Return all replicas, with the load that each worker reports in its heartbeat."""
        self._take_roles()
        loads = {worker.peer.worker_id: worker.core.load() for worker in self._cluster.workers}
        return tuple(_loaded(member, loads.get(WorkerId(member.name))) for member in self._members.values())

    def _add(self, name: str, role: Role) -> None:
        if name in self._members:
            return
        self._members[name] = Replica(name, role, State.STARTING, self._clock.now_s())
        self._clock.at(self._clock.now_s() + self._startup_s[role], self._started, name)
        self._note()

    def _started(self, name: str) -> None:
        member = self._members.get(name)
        if member is None:
            return  # it was given up meanwhile
        self._cluster.join(name, member.role)
        self._enter(member, State.READY)

    def _drain(self, name: str) -> None:
        member = self._members.get(name)
        if member is None or member.state is State.DRAINING:
            return
        if member.state is State.STARTING:
            self._left(name)
            return
        self._enter(member, State.DRAINING)
        self._cluster.drain(name)

    def _flip(self, name: str, role: Role) -> None:
        member = self._members.get(name)
        if member is None or member.state is not State.READY:
            raise ActuatorError(f"{name} does not serve")
        if member.role is role:
            return
        try:
            self._cluster.flip(name, role)
        except CommandError as error:
            raise ActuatorError(str(error)) from error

    def _left(self, name: str) -> None:
        del self._members[name]
        self._note()

    def _enter(self, member: Replica, state: State) -> None:
        self._members[member.name] = replace(member, state=state, since_s=self._clock.now_s())
        self._note()

    def _take_roles(self) -> None:
        """Note the roles that workers have taken."""
        for view in self._cluster.router.workers:
            member = self._members[view.name]
            if member.role is not view.role:
                self._members[view.name] = replace(member, role=view.role)
                self._note()

    def _note(self) -> None:
        """Note how many replicas there are from now on."""
        counts = {state: dict.fromkeys(POOLS, 0) for state in State}
        for member in self._members.values():
            counts[member.state][member.role] += 1
        self.history.append(Sizes(self._clock.now_s(), counts))


def _loaded(member: Replica, load: Load | None) -> Replica:
    if load is None:
        return member
    return replace(
        member,
        num_sequences=sequences_of(member.role, load.num_running, load.num_waiting),
        waiting_tokens=load.waiting_tokens,
        kv_tokens=load.kv_tokens,
    )
