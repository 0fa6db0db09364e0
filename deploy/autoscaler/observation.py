"""What the autoscaler sees of a cluster: made of what routers and an actuator report. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum

from pdserve.base.roles import POOLS, Role
from pdserve.base.values import value
from pdserve.perfmodel.curve import ENOUGH_STEPS, StepCosts
from pdserve.perfmodel.wire import decode_pieces, most_seen, prefill_curve
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.admin import demand_from_proto
from pdserve.protocol.link import ROLES, paging_from_proto
from pdserve.protocol.paging import PAGES_BESIDE, PageShape, Paging
from pdserve.protocol.reports import Demand


class State(Enum):
    """Where a replica is in its life. One that has ended is not listed."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@value
class Listed:
    """A replica, as its actuator lists it."""

    name: str
    role: Role
    state: State
    worker_id: str = ""  # by which routers know it, where that is another name


@value
class Replica:
    """One worker, as its actuator and its routers know it."""

    name: str
    role: Role
    state: State
    since_s: float  # when it was first seen in this state, as `Observation.at_s`
    num_sequences: int = 0  # that it runs, and that wait for their prompts there
    waiting_tokens: int = 0  # of prompts, yet to be computed there
    kv_tokens: int = 0  # of the sequences that it runs


def sequences_of(role: Role, num_running: int, num_waiting: int) -> int:
    """Return how many sequences count for a replica, so that each one counts once in the cluster.

    A sequence that waits for pages of a decode worker is also in the load of the worker that computes or moves it.
    """
    return num_running + (0 if role is Role.DECODE else num_waiting)


@value
class Capacity:
    """What the smallest replica of a role can hold."""

    kv_tokens: int  # as if there were no windows
    max_num_seqs: int
    step_tokens: int  # that a step computes
    page_tokens: int = 1
    groups: tuple[PageShape, ...] = ()  # of layers, where there are several

    @property
    def tokens_beside(self) -> float:
        """Return for how many more tokens than it has routers keep room for a sequence."""
        return (Paging(self.groups).pages_beside if self.groups else PAGES_BESIDE) * self.page_tokens

    def num_sequences(self, num_tokens: float) -> float:
        """Return how many sequences of so many tokens have room for their KV while they decode."""
        if not self.groups:
            return self.kv_tokens / num_tokens
        paging = Paging(self.groups)
        return self.kv_tokens * paging.pages_a_token / paging.mean_pages(num_tokens, 1)

    def kv_usage(self, num_tokens: float, num_sequences: float) -> float:
        """Return which share of the room sequences take that have so many tokens together."""
        if not self.groups or not num_tokens:
            return num_tokens / self.kv_tokens
        return max(1, num_sequences) / self.num_sequences(num_tokens / max(1, num_sequences))


@value
class Observation:
    """A cluster at one moment, and what it did since the last one."""

    at_s: float  # of a clock that never goes back
    unix_s: float  # for schedules
    replicas: tuple[Replica, ...]
    demand: Demand | None  # None: no router has reported, so nothing else here but the replicas is fresh
    seconds: float = 0.0  # that the demand came in
    num_held: int = 0  # requests that wait in routers for a place
    refused: Mapping[str, int] = field(default_factory=dict)  # since the last one, by what bound them (`Cause.value`)
    costs: Mapping[Role, StepCosts] = field(default_factory=dict)  # of steps, as learnt or from a profile
    capacities: Mapping[Role, Capacity] = field(default_factory=dict)

    @property
    def has_requests(self) -> bool:
        """Whether a request has come since the last observation, or waits, or runs."""
        has_come = self.demand is not None and self.demand.num_requests > 0
        is_busy = any(replica.num_sequences or replica.waiting_tokens for replica in self.replicas)
        return has_come or self.num_held > 0 or is_busy


class Observer:
    """Makes observations of what one cluster reports: of counters the differences, of states when they began.

    The capacity of a pool's replicas is remembered, so that a pool which has lost its last one can still be sized.
    """

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, State], float] = {}
        self._counts: dict[str, tuple[Demand, Counter[str]]] = {}  # by router: what came, and what was refused
        self._counted_s: float | None = None  # when these were counted
        self._capacities: dict[Role, Capacity] = {}  # as last seen

    def observe(
        self, at_s: float, unix_s: float, listed: Sequence[Listed], statuses: Sequence[admin.ClusterStatus] | None
    ) -> Observation:
        """Return what is seen at a moment. `statuses`: of all routers; None where one of them did not answer.

        ProtocolError where a router's counts do not have the shape of this version's.
        """
        workers = _workers(statuses or ())
        replicas = self._replicas(at_s, listed, workers)
        if statuses is None:
            return Observation(at_s, unix_s, replicas, demand=None)
        demand, refused = self._new_counts(statuses)
        before_s, self._counted_s = self._counted_s, at_s
        self._capacities |= _capacities([worker.registration for worker in workers.values()])
        return Observation(
            at_s=at_s,
            unix_s=unix_s,
            replicas=replicas,
            demand=demand,
            seconds=0.0 if before_s is None else at_s - before_s,
            num_held=sum(status.num_held for status in statuses),
            refused=refused,
            costs=_costs([learnt for status in statuses for learnt in status.costs]),
            capacities=dict(self._capacities),
        )

    def _replicas(
        self, at_s: float, listed: Sequence[Listed], workers: dict[str, admin.WorkerStatus]
    ) -> tuple[Replica, ...]:
        replicas = tuple(self._replica(at_s, each, workers.get(each.worker_id or each.name)) for each in listed)
        self._since_s = {(replica.name, replica.state): replica.since_s for replica in replicas}
        return replicas

    def _replica(self, at_s: float, listed: Listed, worker: admin.WorkerStatus | None) -> Replica:
        state, role, load = listed.state, listed.role, link.Heartbeat()
        if worker is not None:
            role, load = ROLES.get(worker.registration.role, role), worker.load
            if load.draining:
                state = State.DRAINING
            elif state is State.STARTING and worker.registration.ready:
                state = State.READY
        return Replica(
            name=listed.name,
            role=role,
            state=state,
            since_s=self._since_s.get((listed.name, state), at_s),
            num_sequences=sequences_of(role, load.num_running, load.num_waiting),
            waiting_tokens=load.waiting_tokens,
            kv_tokens=load.kv_tokens,
        )

    def _new_counts(self, statuses: Sequence[admin.ClusterStatus]) -> tuple[Demand, Mapping[str, int]]:
        """Return what came since the last time, and what was refused. What a new router has counted so far is not new.

        A router whose counts are smaller than before has started again: all that it counts is new.
        """
        found = {
            each.router_id: (demand_from_proto(each.demand), Counter(dict(each.refused_because))) for each in statuses
        }
        demand, refused = Demand(), Counter[str]()
        for name in found.keys() & self._counts.keys():
            (came, refusals), (came_before, before) = found[name], self._counts[name]
            demand += came.since(came_before)
            has_restarted = any(refusals[cause] < count for cause, count in before.items())
            refused += refusals if has_restarted else refusals - before
        self._counts = found
        return demand, refused


def _workers(statuses: Iterable[admin.ClusterStatus]) -> dict[str, admin.WorkerStatus]:
    """Return each worker as one router sees it: it reports the same load to all of them."""
    return {worker.registration.worker_id: worker for status in statuses for worker in status.workers}


def _costs(learnt: Sequence[admin.LearntCosts]) -> dict[Role, StepCosts]:
    """Return what steps cost in each role, as far as a router has learnt it.

    A pool that has hardly run prefill steps, or decode steps, is given the other pool's costs of them.
    """
    prefill, decode = most_seen(learnt, link.ROLE_PREFILL), most_seen(learnt, link.ROLE_DECODE)
    known = {costs.role for costs in learnt}
    prefill = prefill if prefill.role in known else decode
    decode = decode if decode.role in known else prefill
    if not known:
        return {}
    in_decode = decode if decode.num_prefill_steps >= ENOUGH_STEPS else prefill
    in_prefill = prefill if prefill.num_decode_steps >= ENOUGH_STEPS else decode
    return {
        Role.PREFILL: StepCosts(prefill_curve(prefill), decode_pieces(in_prefill)),
        Role.DECODE: StepCosts(prefill_curve(in_decode), decode_pieces(decode)),
    }


def _capacities(workers: Sequence[link.Register]) -> dict[Role, Capacity]:
    """Return what the smallest worker of each pool holds; mixed ones are in both."""
    found = {}
    for role in POOLS:
        ready = [worker for worker in workers if worker.ready and worker.layout.page_size]
        here = [w for w in ready if w.role in ROLES and ROLES[w.role].is_in(role)]
        if here:
            pagings = [paging_from_proto(worker.layout) for worker in here]
            held = [paging.whole_tokens(worker.num_pages) for paging, worker in zip(pagings, here, strict=True)]
            least = pagings[held.index(min(held))]
            found[role] = Capacity(
                kv_tokens=min(held),
                max_num_seqs=min(worker.max_num_seqs for worker in here),
                step_tokens=min(worker.max_num_batched_tokens for worker in here),
                page_tokens=max(paging.span for paging in pagings),
                groups=() if least.is_single else least.shapes,
            )
    return found
