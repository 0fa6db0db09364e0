"""Workers' cores, each able to hand off to each other one, with streams that deliver in any order between them."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from default_rules import default_rules

from faultsim.engine import FakeRunner, expected
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer import doors, sender
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.prefix_hash import PrefixHasher
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Event, Failed, Placed, RoleTaken, RouterRef, Tokens

VOCAB, PAGE_SIZE, MAX_MODEL_LEN = 997, 4, 40
ROUTER = RouterRef(1)


def job(number: int, num_tokens: int, max_tokens: int = 8) -> Job:
    """Return a request with one continuation, and a prompt that no other has."""
    prompt = tuple((31 * number + place) % VOCAB for place in range(num_tokens))
    params = SamplingParams(max_tokens=max_tokens, seed=number)
    return Job(RequestId(number.to_bytes(16)), Attempt(0), prompt, num_tokens, params, (0,))


def wanted(each: Job) -> list[int]:
    """Return the tokens that one engine alone computes for a job."""
    return expected(each.token_ids, each.params.seed, each.params.max_tokens, VOCAB)


class CoreWorker:
    """One core and its engine."""

    def __init__(self, name: str, num_pages: int, max_num_seqs: int = 8, **rules: object) -> None:
        limits = Limits(max_num_seqs, 64, MAX_MODEL_LEN, frozenset())
        self.peer = Peer(WorkerId(name), Incarnation(1))
        self.scheduler = Scheduler(KvCache(num_pages, PAGE_SIZE, PrefixHasher(b"secret", "model", PAGE_SIZE)), limits)
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB)
        self.core = WorkerCore(self.scheduler, VOCAB, self.runner.page_bytes, b"secret", default_rules(**rules))
        self.dialled: set[Peer] = set()


@dataclass
class WiredCores:
    """Cores by name, and what a router sees of them."""

    workers: dict[str, CoreWorker]
    streams: dict[tuple[str, ...], deque[Any]] = field(default_factory=dict)
    tokens: dict[HandoffKey, dict[int, int]] = field(default_factory=dict)
    finished: set[HandoffKey] = field(default_factory=set)
    failed: list[Failed] = field(default_factory=list)
    roles: list[tuple[str, RoleTaken]] = field(default_factory=list)

    def send(self, name: str, *events: Event) -> None:
        """Let a router send these to a worker."""
        self._stream("router", name).extend(events)

    def place(self, each: Job, source: str, target: str) -> None:
        """Send both halves of a hand-off, as a router does: neither waits for the other."""
        here, there = self.workers[source].peer, self.workers[target].peer
        self.send(source, Placed(ROUTER, each, 1e9, target=there, target_address=target))
        self.send(target, Placed(ROUTER, each, 1e9, source=here))

    def run(self, rng: random.Random, steps: int = 100_000) -> None:
        """Let anything that can happen happen, in random order, until nothing can."""
        for _ in range(steps):
            ready = [name for name, stream in self.streams.items() if stream]
            choice = rng.choice([*ready, *((name,) for name in self.workers)])
            if len(choice) > 1:
                self.deliver(choice)
            elif not self.step(choice[0]) and not ready and not sum(self.step(name) for name in self.workers):
                return
        raise AssertionError("it never comes to rest")

    def step(self, name: str) -> bool:
        worker = self.workers[name]
        plan = worker.core.plan(0.0)
        if plan is None:
            return False
        self.perform(name, worker.core.commit(plan, worker.runner.run(plan), 0.0))
        return True

    def deliver(self, stream: tuple[str, ...]) -> None:
        """Let the next thing of a stream arrive."""
        item, name = self.streams[stream].popleft(), stream[1]
        worker = self.workers[name]
        match item:
            case doors.Copy():
                there = self.workers[item.peer.worker_id].runner
                for src, dst in zip(item.src, item.dst, strict=True):
                    there.page(dst)[:] = worker.runner.page(src)
                digests = tuple(hash(bytes(worker.runner.page(page))) for page in item.src)
                item = doors.ReceiverSaid(item.peer, item.key, sender.CopyStopped(digests))
            case doors.CheckDigests():
                found = [hash(bytes(worker.runner.page(page))) for page in item.pages]
                wrong = [place for place, digest in enumerate(item.digests) if digest != found[place]]
                item = doors.DigestsChecked(item.key, wrong[0] if wrong else None)
        self.perform(name, worker.core.handle(item, 0.0))

    def perform(self, name: str, commands: list[Any]) -> None:
        worker = self.workers[name]
        for command in commands:
            match command:
                case Tokens():
                    self._take(command)
                case Failed():
                    self.failed.append(command)
                case RoleTaken():
                    self.roles.append((name, command))
                case doors.Connect(peer) if peer not in worker.dialled:
                    worker.dialled.add(peer)
                    self._stream("sender", peer.worker_id, name).append(doors.SenderAttached(worker.peer))
                case doors.Copy() | doors.CheckDigests():
                    self._stream("own", name, type(command).__name__).append(command)
                case doors.ToReceiver(peer, key, message):
                    event = doors.SenderSaid(worker.peer, key, message)
                    self._stream("sender", peer.worker_id, name).append(event)
                case doors.ToSender(peer, key, message):
                    event = doors.ReceiverSaid(worker.peer, key, message)
                    self._stream("receiver", peer.worker_id, name).append(event)

    def output(self, each: Job) -> list[int]:
        drawn = self.tokens.get(each.key, {})
        return [drawn[position] for position in sorted(drawn)]

    def assert_nothing_held(self) -> None:
        for worker in self.workers.values():
            worker.scheduler.cache.check()
            assert worker.core.idle
            assert worker.scheduler.cache.pool.num_free == worker.scheduler.cache.pool.num_pages

    def _stream(self, *name: str) -> deque[Any]:
        return self.streams.setdefault(name, deque())

    def _take(self, tokens: Tokens) -> None:
        drawn = self.tokens.setdefault(tokens.key, {})
        known = drawn.setdefault(tokens.position, tokens.token.token_id)  # both workers report a first token
        assert known == tokens.token.token_id, "a position was reported twice, and differs"
        if tokens.finish is not None:
            self.finished.add(tokens.key)
