"""One worker's core with an engine, whose routers and peers a test plays."""

from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.base.ids import Attempt, AttemptKey, Generation, PageId, Peer, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.kvtransfer.session import Grant
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Command, Event, Placed, RouterRef, Ticked

PAGE_SIZE, VOCAB = 4, 100
ROUTER = RouterRef(1)
FAR_S = 1e9


def key_of(number: int) -> AttemptKey:
    return AttemptKey(RequestId(number.to_bytes(16)), Attempt(0))


def job(number: int, num_tokens: int, max_tokens: int = 8, n: int = 1) -> Job:
    key, params = key_of(number), SamplingParams(max_tokens=max_tokens, n=n)
    return Job(key.request_id, key.attempt, tuple(range(num_tokens)), num_tokens, params, tuple(range(n)))


def grant(num_pages: int) -> Grant:
    """Return a grant of a receiver's first pages."""
    return Grant(0, tuple(map(PageId, range(num_pages))), (Generation(1),) * num_pages, bytes(16), 4.0)


class LoneCore:
    """A worker's core and engine. Time stands still unless the test lets it pass."""

    def __init__(
        self,
        num_pages: int = 16,
        max_model_len: int = 40,
        *,
        hasher: PrefixHasher | None = None,
        max_num_seqs: int = 8,
        step_tokens: int = 64,
        ends: frozenset[int] = frozenset(),
        **rules: object,
    ) -> None:
        self.cache = KvCache(num_pages, Paging.of(PAGE_SIZE), hasher)
        self.scheduler = Scheduler(self.cache, Limits(max_num_seqs, step_tokens, max_model_len, ends))
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB)
        self.core = WorkerCore(self.scheduler, VOCAB, self.runner.page_bytes, b"key", default_rules(**rules))
        self.now_s = 0.0

    def handle(self, event: Event) -> list[Command]:
        return self.core.handle(event, self.now_s)

    def place(self, job: Job, source: Peer | None = None, target: Peer | None = None) -> list[Command]:
        return self.handle(Placed(ROUTER, job, FAR_S, source, target, "host:1" if target is not None else ""))

    def hear(self, peer: Peer, number: int, event: object) -> list[Command]:
        """Let a receiver say something about a hand-off, or a copy to it stop."""
        return self.handle(doors.ReceiverMessage(peer, key_of(number), event))  # type: ignore[arg-type]

    def step(self) -> list[Command]:
        plan = self.core.plan(self.now_s)
        assert plan is not None
        return self.core.commit(plan, self.runner.run(plan), self.now_s)

    def compute(self) -> list[Command]:
        """Run steps until there is nothing to compute."""
        commands: list[Command] = []
        while (plan := self.core.plan(self.now_s)) is not None:
            commands += self.core.commit(plan, self.runner.run(plan), self.now_s)
        return commands

    def pass_time(self, seconds: float) -> list[Command]:
        commands: list[Command] = []
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.now_s += HEARTBEAT_S
            commands += self.handle(Ticked(HEARTBEAT_S))
        return commands
