"""Answers that move between workers, whatever happens in whatever order: each token is delivered once, each request
ends once and soon, and nothing is left of any.

The workers here keep to the protocol of a move, each at its own pace: the source decodes on, cuts over and commits; the
target admits or withdraws; what is in doubt is not resumed.
"""

import zlib
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings
from router_driver import STOP, Driver

from pdserve.base.ids import Attempt, RequestId
from pdserve.capacity.wires import Delta
from pdserve.protocol.reports import Failure, ReportedLoad, Stage
from pdserve.router.config import Limits
from pdserve.router.requests.commands import CancelAttempt, Command, Finished, Move, Place, SequenceSpec
from pdserve.router.requests.events import (
    AttemptFailed,
    ClientGone,
    DrainAsked,
    Event,
    LinkId,
    LinkLost,
    LoadReported,
    MovesAsked,
    StageReached,
    StepReported,
    StopStringFound,
)

Key = tuple[RequestId, Attempt]
NUM_TOKENS = 40
PATIENCE = 200  # rounds in which all that is left has to end


def token_of(request_id: bytes, index: int, position: int) -> int:
    return zlib.crc32(b"%b %d %d" % (request_id, index, position)) % 1000


@dataclass
class Handover:
    """One continuation on its way."""

    key: Key  # of the new attempt
    old: Key
    index: int
    source: LinkId
    target: LinkId
    base: int  # tokens that the target's work names
    committed: int | None = None  # tokens it had when the source committed
    is_sent: bool = False  # the commit is on its way, or was taken


@dataclass
class Worker:
    link: LinkId
    runs: dict[Key, dict[int, int]] = field(default_factory=dict)  # the next position, by index
    outbox: deque[Event] = field(default_factory=deque)


class World(Driver):
    """The router's core among workers that move what they are asked to."""

    def __init__(self) -> None:
        super().__init__(Limits(worker_silence_s=1e6, max_interruptions=100, max_attempts=100))
        self.workers: dict[LinkId, Worker] = {}
        self.handovers: dict[Key, Handover] = {}
        self.requests: list[RequestId] = []
        for name in ("p0", "d0", "d1", "d2"):
            self.join(name)

    def join(self, name: str) -> None:
        link = LinkId(self._num_links + 1)
        self.workers[link] = Worker(link)
        self.attach(name)

    def post(self, event: Event) -> list[Command]:
        for command in super().post(event):
            match command:
                case Place(spec, prefill, decode):
                    assert prefill is not None
                    assert decode is not None
                    self._compute_prompt(spec, prefill.link, decode.link)
                case Move(spec, attempt, source, target):
                    key, (index,) = (spec.request_id, spec.attempt), spec.indices
                    old, base = (spec.request_id, attempt), len(spec.token_ids) - spec.num_prompt_tokens
                    if index in self.workers[source.link].runs.get(old, {}):
                        self.handovers[key] = Handover(key, old, index, source.link, target.link, base)
                    else:  # it ended there meanwhile, so no hand-off comes
                        self._fail(target.link, key)
                case CancelAttempt():
                    self._cancel(command)
        return self.last

    def _compute_prompt(self, spec: SequenceSpec, prefill: LinkId, decode: LinkId) -> None:
        key, first = (spec.request_id, spec.attempt), len(spec.token_ids) - spec.num_prompt_tokens
        for index in spec.indices:
            self._report(self.workers[prefill], key, index, first, first + 1)
        worker = self.workers[decode]
        worker.outbox.append(StageReached(decode, *key, Stage.COMMITTED, 0.0))
        worker.runs[key] = dict.fromkeys(spec.indices, first)

    def _report(self, worker: Worker, key: Key, index: int, start: int, stop: int) -> None:
        tokens = tuple(token_of(key[0], index, position) for position in range(start, stop))
        end = STOP if stop == NUM_TOKENS else 0
        worker.outbox.append(StepReported(worker.link, [Delta(key[0], key[1], index, start, tokens, end)]))

    def _fail(self, link: LinkId, key: Key) -> None:
        if link in self.workers:
            self.workers[link].runs.pop(key, None)
            self.workers[link].outbox.append(AttemptFailed(link, *key, Failure.PEER_LOST, "so it goes"))

    def _cancel(self, cancel: CancelAttempt) -> None:
        worker = self.workers[cancel.link]
        for key in [k for k in worker.runs if k[0] == cancel.request_id and k[1] <= cancel.attempt]:
            for index in tuple(worker.runs[key]):
                if not cancel.indices or index in cancel.indices:
                    self._drop(worker, key, index)
        for handover in tuple(self.handovers.values()):
            key = handover.key
            is_named = not cancel.indices or handover.index in cancel.indices
            if (handover.target, key[0]) == (cancel.link, cancel.request_id) and key[1] <= cancel.attempt and is_named:
                self._withdraw(handover, reports=False)

    def _drop(self, worker: Worker, key: Key, index: int) -> None:
        """End a continuation on a worker, and any move of it that is not out of its hands."""
        del worker.runs[key][index]
        if not worker.runs[key]:
            del worker.runs[key]
        for handover in tuple(self.handovers.values()):
            if (handover.old, handover.index, handover.source) == (key, index, worker.link) and not handover.is_sent:
                del self.handovers[handover.key]
                self._fail(handover.target, handover.key)

    # ---- one step of a move

    def commit(self, handover: Handover) -> None:
        """Let the source cut over: it has the continuation no longer, and may not go on with it."""
        worker = self.workers.get(handover.source)
        if worker is None or handover.is_sent or handover.index not in worker.runs.get(handover.old, {}):
            return
        handover.committed, handover.is_sent = worker.runs[handover.old].pop(handover.index), True
        if not worker.runs[handover.old]:
            del worker.runs[handover.old]

    def admit(self, handover: Handover) -> None:
        """Let the target go on with it; the source learns of it, and says nothing."""
        worker = self.workers.get(handover.target)
        if worker is None or handover.committed is None:
            return
        del self.handovers[handover.key]
        worker.outbox.append(StageReached(worker.link, *handover.key, Stage.COMMITTED, 0.0))
        worker.runs[handover.key] = {handover.index: handover.base}

    def refuse(self, handover: Handover) -> None:
        self._withdraw(handover, reports=True)

    def _withdraw(self, handover: Handover, *, reports: bool) -> None:
        """Let the target give it up: the source goes on, unless its present attempt was cancelled meanwhile."""
        del self.handovers[handover.key]
        if reports:
            self._fail(handover.target, handover.key)
        request = self.core.placements.requests.get(handover.key[0])
        sequence = None if request is None else request.sequences[handover.index]
        source = self.workers.get(handover.source)
        if source is None or handover.committed is None or sequence is None or sequence.placement is None:
            return
        if sequence.placement.key == handover.old:
            source.runs.setdefault(handover.old, {})[handover.index] = handover.committed

    def sever(self, handover: Handover) -> None:
        """Break the stream between the two."""
        del self.handovers[handover.key]
        self._fail(handover.target, handover.key)
        if handover.is_sent:
            self.fail_attempt(handover.source, handover.old)

    def fail_attempt(self, link: LinkId, key: Key) -> None:
        """Let a worker give an attempt up."""
        if link not in self.workers:
            return
        for index in tuple(self.workers[link].runs.get(key, ())):
            self._drop(self.workers[link], key, index)
        self._fail(link, key)

    def die(self, link: LinkId) -> None:
        for handover in [h for h in self.handovers.values() if link in (h.source, h.target)]:
            if handover.source == link and handover.is_sent:
                continue  # the commit has left, and arrives
            del self.handovers[handover.key]
            if handover.source == link:
                self._fail(handover.target, handover.key)
            elif handover.is_sent:
                self.fail_attempt(handover.source, handover.old)
        del self.workers[link]
        self.post(LinkLost(link, "died"))

    def compute(self, worker: Worker, count: int) -> None:
        for key, runs in tuple(worker.runs.items()):
            for index, start in tuple(runs.items()):
                stop = min(NUM_TOKENS, start + count)
                self._report(worker, key, index, start, stop)
                runs[index] = stop
                if stop == NUM_TOKENS:
                    self._drop(worker, key, index)

    def settle(self) -> None:
        """Let everything go on undisturbed until all has ended."""
        for _ in range(PATIENCE):
            for worker in tuple(self.workers.values()):
                self.compute(worker, 3)
                while worker.outbox:
                    self.post(worker.outbox.popleft())
            for handover in tuple(self.handovers.values()):
                self.commit(handover)
                self.admit(handover)
            self.run(0.1)
            if set(self.requests) == set(self.ends):
                return


MOVING = ("commit", "admit", "refuse", "sever")
ACTIONS = ("hear",) * 12 + ("compute",) * 6 + ("ask",) * 5 + ("commit", "admit") * 4 + MOVING
ACTIONS += ("arrive",) * 2 + ("die",) * 3 + ("fail", "drain", "stop", "leave", "wait")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_moves_is_delivered_once_and_ends_once(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(10, 80))):
        _act(world, data.draw(st.sampled_from(ACTIONS)), data)
    world.join("p1")
    world.join("d3")
    world.settle()
    for request in world.requests:
        outcome = world.ends.get(request)
        assert outcome is not None, "it hangs"
        for (request_id, index), tokens in world.delivered.items():
            if request_id == request:
                assert tokens == [token_of(request, index, position) for position in range(len(tokens))]
                assert not isinstance(outcome, Finished) or len(tokens) in range(1, NUM_TOKENS + 1)
    world.core.check_idle()
    assert not [worker.runs for worker in world.workers.values() if worker.runs], "a worker goes on with what has ended"


def _act(world: World, action: str, data: st.DataObject) -> None:
    decodes = [worker for worker in world.workers.values() if worker.link != 1]
    running = [request for request in world.requests if request not in world.ends]
    if action == "arrive" and len(world.requests) < 4:
        world.requests.append(world.arrive(n=data.draw(st.sampled_from([1, 1, 2])), max_tokens=NUM_TOKENS))
    elif action == "wait":
        world.run(data.draw(st.sampled_from([0.05, 1.1])))
    elif action in MOVING and world.handovers:
        getattr(world, action)(world.handovers[data.draw(st.sampled_from(sorted(world.handovers)))])
    elif action in ("stop", "leave") and running:
        request = data.draw(st.sampled_from(running))
        world.post(ClientGone(request) if action == "leave" else StopStringFound(request, 0))
    elif action in ("hear", "compute", "ask", "fail", "die", "drain") and decodes:
        _act_of_worker(world, data.draw(st.sampled_from(list(world.workers.values()))), action, data)


def _act_of_worker(world: World, worker: Worker, action: str, data: st.DataObject) -> None:
    match action:
        case "hear" if worker.outbox:
            world.post(worker.outbox.popleft())
        case "compute":
            world.compute(worker, data.draw(st.integers(1, 5)))
        case "ask":
            world.post(MovesAsked(worker.link, None, data.draw(st.integers(0, 2))))
        case "drain" if worker.link != 1:
            world.post(DrainAsked(worker.link))
            world.post(LoadReported(worker.link, ReportedLoad(100, draining=True)))
        case "fail" if worker.runs:
            world.fail_attempt(worker.link, data.draw(st.sampled_from(sorted(worker.runs))))
        case "die" if len(world.workers) > 2:
            world.die(worker.link)
