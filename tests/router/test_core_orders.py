"""Whatever happens in whatever order, under each policy: each request ends once, its tokens come once and in order,
nothing is left, and each decision's score is between 0 and 1."""

import zlib
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings
from router_driver import LENGTH, Driver

from pdserve.base.ids import Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.capacity.wires import Delta
from pdserve.perfmodel.curve import Step
from pdserve.perfmodel.model import ENOUGH_STEPS
from pdserve.protocol.reports import Failure, ReportedLoad, Stage
from pdserve.router.config import Limits
from pdserve.router.placement.policies import POLICIES
from pdserve.router.placement.routing import Decision, Demand, Group, Placed
from pdserve.router.requests.commands import (
    CancelAttempt,
    Command,
    Deliver,
    DropLink,
    End,
    Finished,
    Place,
    SequenceSpec,
)
from pdserve.router.requests.events import (
    AttemptFailed,
    ClientGone,
    Event,
    LinkId,
    LinkLost,
    LoadReported,
    ProcessEnded,
    ShutdownDue,
    StageReached,
    StepReported,
    StopStringFound,
)

LIMITS = Limits(max_num_requests=4, max_num_held=2)
DEADLINE_S = 30.0
STEP_S = 0.01
Key = tuple[RequestId, Attempt]


def token_of(request_id: bytes, index: int, position: int) -> int:
    return zlib.crc32(b"%b %d %d" % (request_id, index, position)) % 1000


@dataclass
class Worker:
    """A worker of which every message may be late, but none overtakes another of its own."""

    link: LinkId
    worker_id: WorkerId
    role_epoch: int = 0
    specs: dict[Key, SequenceSpec] = field(default_factory=dict)
    leaving: set[Key] = field(default_factory=set)  # of these, decoded elsewhere
    next_position: dict[tuple[Key, int], int] = field(default_factory=dict)
    outbox: deque[Event] = field(default_factory=deque)

    def take(self, spec: SequenceSpec, *, leaves: bool = False) -> None:
        key = (spec.request_id, spec.attempt)
        self.specs[key] = spec
        if leaves:
            self.leaving.add(key)
        num_delivered = len(spec.token_ids) - spec.num_prompt_tokens
        for index in spec.indices:
            self.next_position[key, index] = num_delivered

    def cancel(self, command: CancelAttempt) -> None:
        for key in [k for k in self.specs if k[0] == command.request_id and k[1] <= command.attempt]:
            left = [i for i in self.specs[key].indices if command.indices and i not in command.indices]
            for index in set(self.specs[key].indices) - set(left):
                self.next_position.pop((key, index), None)
            if not left:
                del self.specs[key]

    def compute(self, key: Key, num_tokens: int) -> None:
        """Draw the next tokens of each continuation that is not done."""
        spec = self.specs[key]
        deltas = []
        for index in spec.indices:
            start = self.next_position.get((key, index))
            stop = spec.params.max_tokens if start is None else min(start + num_tokens, spec.params.max_tokens)
            if start is None or start == stop:
                continue
            tokens = tuple(token_of(spec.request_id, index, position) for position in range(start, stop))
            is_last = stop == spec.params.max_tokens
            deltas.append(Delta(spec.request_id, spec.attempt, index, start, tokens, LENGTH * is_last))
            self.next_position[key, index] = stop
        if deltas:
            self.outbox.append(StepReported(self.link, deltas))
        positions = [self.next_position.get((key, index), spec.params.max_tokens) for index in spec.indices]
        if key in self.leaving or min(positions) == spec.params.max_tokens:
            del self.specs[key]


class World(Driver):
    """The core with everything around it; checks each command against what was promised."""

    def __init__(self, policy: str, *, local: bool) -> None:
        """With `local`, decode workers may compute prompts themselves."""
        super().__init__(LIMITS.model_copy(update={"local_prefill": local}), policy=policy)
        self._compares = policy != "round_robin"
        self.workers: dict[LinkId, Worker] = {}
        self.requests: list[RequestId] = []
        self.has_lied = False

    def decide(self, groups: Seq[Group], demand: Demand) -> Decision:
        decision = super().decide(groups, demand)
        if isinstance(decision, Placed):
            assert (decision.score is not None) is self._compares
            assert decision.score is None or 0 <= decision.score <= 1
        return decision

    def post(self, event: Event) -> list[Command]:
        over = set(self.ends)
        for command in super().post(event):
            match command:
                case Place(spec, prefill, decode):
                    assert spec.request_id not in over
                    self._check_spec(spec)
                    if prefill is not None:
                        self.workers[prefill.link].take(spec, leaves=decode is not None)
                    if decode is not None:
                        self.workers[decode.link].take(spec)
                case CancelAttempt():
                    self.workers[command.link].cancel(command)
                case DropLink(link):
                    del self.workers[link]
                case Deliver(request_id, index):
                    assert request_id not in over, "tokens after the end"
                    tokens = self.delivered[request_id, index]
                    assert tokens == [token_of(request_id, index, position) for position in range(len(tokens))]
                case End(request_id, outcome):
                    over.add(request_id)
                    if isinstance(outcome, Finished):
                        self._check_ledger(outcome)
        return self.last

    def _check_spec(self, spec: SequenceSpec) -> None:
        known = list(spec.token_ids[spec.num_prompt_tokens :])
        for index in spec.indices:
            assert self.delivered.get((spec.request_id, index), []) == known

    def _check_ledger(self, outcome: Finished) -> None:
        steps = outcome.ledger.steps
        at_ms = [ms for _, ms in steps]
        assert steps[0] == (Stage.RECEIVED, 0.0)
        assert at_ms == sorted(at_ms)
        assert dict(steps)[Stage.FIRST_TOKEN] == outcome.ledger.ttft_ms

    def is_to_come(self, key: Key) -> bool:
        """Whether a prompt is yet to be computed elsewhere before it is decoded."""
        return any(key in worker.specs and key in worker.leaving for worker in self.workers.values())

    def join(self, role: Role, name: str) -> None:
        link = LinkId(self._num_links + 1)
        self.workers[link] = Worker(link, WorkerId(name))
        self.attach(name, incarnation=link, role=role)
        step = Step(3, 9) if role is Role.PREFILL else Step(sequences=1, kv_tokens=4)
        for _ in range(ENOUGH_STEPS):  # so that a policy may refuse for an objective's sake
            self.post(StepReported(link, [], step, STEP_S))


OFTEN = ["hear"] * 8 + ["compute"] * 8 + ["arrive"] * 3 + ["attach"] * 2
SELDOM = ["fail", "die", "gone", "lie", "stage", "flip", "beat", "leave", "stop", "wait"]
ACTIONS = st.sampled_from(OFTEN + SELDOM)
CLUSTERS = [("p0", "d0"), ("p0", "d0", "d1"), ("p0", "p1", "d0", "d1")]
ALONE = [("d0",), ("d0", "d1")]  # where decode workers may compute prompts


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_request_ends_once_and_its_tokens_come_once_in_order(data: st.DataObject) -> None:
    local = data.draw(st.booleans())
    world = World(data.draw(st.sampled_from(sorted(POLICIES))), local=local)
    for name in data.draw(st.sampled_from(CLUSTERS + ALONE * local)):
        world.join(Role.PREFILL if name[0] == "p" else Role.DECODE, name)
    for _ in range(data.draw(st.integers(10, 60))):
        _act(world, data.draw(ACTIONS), data)
        assert world.core.num_active <= LIMITS.max_num_requests
        assert world.core.num_held <= LIMITS.max_num_held
    if data.draw(st.booleans()):
        world.post(ShutdownDue())
    else:
        _wait_for_deadlines(world)
    assert world.ends.keys() == set(world.requests)
    for request, end in world.ends.items():
        if isinstance(end, Finished):
            delivered = [len(tokens) for (whose, _), tokens in world.delivered.items() if whose == request]
            assert end.usage.completion_tokens == sum(delivered)
    world.core.check_idle()
    told = all(not worker.specs for worker in world.workers.values())
    assert told or world.has_lied, "a worker goes on with a request that has ended"


def _wait_for_deadlines(world: World) -> None:
    """Let time pass while workers do nothing but live."""
    for _ in range(int(DEADLINE_S) + 1):
        for link in tuple(world.workers):
            world.post(LoadReported(link, ReportedLoad(100)))
        world.run(1.0)


def _act(world: World, action: str, data: st.DataObject) -> None:
    match action:
        case "arrive":
            n, max_tokens = data.draw(st.sampled_from([1, 1, 3])), data.draw(st.integers(1, 6))
            slo_s = data.draw(st.sampled_from([None, STEP_S / 10, 1.5 * STEP_S, 10 * STEP_S]))
            priority, tenant = data.draw(st.integers(0, 2)), f"tenant {n}"
            terms = {"n": n, "max_tokens": max_tokens}
            world.requests.append(
                world.arrive(priority=priority, deadline_in_s=DEADLINE_S, tenant=tenant, slo_s=slo_s, **terms)
            )
        case "attach":
            role = data.draw(st.sampled_from(Role))
            world.join(role, f"{role.value[0]}{data.draw(st.integers(0, 1))}")
        case "wait":
            world.run(data.draw(st.sampled_from([0.01, 0.1, 1.0, 6.0])))
        case "leave" | "stop":
            _act_of_client(world, action, data)
        case _:
            needs_outbox = action == "hear"
            able = [w for w in world.workers.values() if (w.outbox if needs_outbox else w.specs)]
            if able:
                _act_of_worker(world, data.draw(st.sampled_from(able)), action, data)


def _act_of_client(world: World, action: str, data: st.DataObject) -> None:
    able = [request for request in world.requests if action == "leave" or (request, 0) in world.delivered]
    if able:
        request_id = data.draw(st.sampled_from(able))
        world.post(ClientGone(request_id) if action == "leave" else StopStringFound(request_id, 0))


def _act_of_worker(  # noqa: C901 - one match
    world: World, worker: Worker, action: str, data: st.DataObject
) -> None:
    if action == "hear":
        world.post(worker.outbox.popleft())
        return
    key = data.draw(st.sampled_from(sorted(worker.specs)))
    match action:
        case "compute" if key not in worker.leaving and world.is_to_come(key):
            pass
        case "compute":
            worker.compute(key, 1 if key in worker.leaving else data.draw(st.integers(1, 6)))
        case "flip":
            worker.role_epoch += 1
            role = data.draw(st.sampled_from(Role))
            worker.outbox.append(LoadReported(worker.link, ReportedLoad(100, role=role, role_epoch=worker.role_epoch)))
        case "beat":
            world.post(LoadReported(worker.link, ReportedLoad(100)))
        case "die":
            world.post(LinkLost(worker.link, "died"))
            del world.workers[worker.link]
        case "gone":
            world.post(ProcessEnded(Peer(worker.worker_id, Incarnation(worker.link))))
        case "fail":
            worker.specs.pop(key)
            failure = data.draw(st.sampled_from(Failure))
            worker.outbox.append(AttemptFailed(worker.link, *key, failure, "so it goes"))
        case "lie":
            index, position = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 9))
            tokens = (token_of(key[0], index, position),)
            world.has_lied = True
            world.post(StepReported(worker.link, [Delta(*key, index, position, tokens)]))
        case "stage":
            stage = data.draw(
                st.sampled_from([Stage.PREFILL_STARTED, Stage.PREFILL_DONE, Stage.LANDED, Stage.COMMITTED])
            )
            worker.outbox.append(StageReached(worker.link, *key, stage, data.draw(st.floats(0, 1))))
