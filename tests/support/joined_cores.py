"""Workers' cores, the streams between them, and engines whose tokens depend on all that they look at.

Everything that happens between two workers waits in a stream until the test lets it happen. A step writes to pages
when it is committed, so that whatever reads them too early sees another KV.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol
from zlib import crc32

from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.base.ids import AttemptKey, PageId, Peer
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import SampleSpec, StepPlan, StepResult, Tokens
from pdserve.executor.failing import Isolating
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import FromSender
from pdserve.protocol.sampling import SampledToken, TokenLogprobs
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Event, RouterRef

VOCAB = 997
PAGE_SIZE = 4
MOST_DRAFTS = 3
ROUTER = RouterRef(1)


class PageRunner(Protocol):
    """Computes steps on pages that a test can read and write."""

    def run(self, plan: StepPlan) -> StepResult: ...
    def read(self, page: PageId) -> bytes: ...
    def write(self, page: PageId, content: bytes) -> None: ...


class AttentiveRunner(FakeRunner):
    """Samples tokens that depend on all that a sampler looks at.

    Each has a log probability that depends on it, where they are asked for.
    """

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        pairs = zip(plan.chunks, result.tokens, strict=True)
        return replace(result, tokens=tuple([_attend(chunk.samples, tokens) for chunk, tokens in pairs]))

    def read(self, page: PageId) -> bytes:
        return bytes(self.page(page))

    def write(self, page: PageId, content: bytes) -> None:
        self.page(page)[:] = content


def _attend(samples: tuple[SampleSpec, ...], tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
    pairs = zip(samples, tokens, strict=True)
    return tuple([tuple([_with_penalties(spec, token) for token in gained]) for spec, gained in pairs])


def _with_penalties(spec: SampleSpec, token: SampledToken) -> SampledToken:
    before = b"%d %d %d" % (sum(spec.prompt_ids), sum(spec.output_ids), spec.forbid_stops)
    has_influence = spec.params.has_penalties or spec.forbid_stops
    token_id = crc32(before, token.token_id) % VOCAB if has_influence else token.token_id
    logprobs = TokenLogprobs(-float(token_id + spec.index), ()) if spec.params.logprobs is not None else None
    return SampledToken(token_id, logprobs)


def attentive(num_pages: int) -> AttentiveRunner:
    return AttentiveRunner(num_pages, PAGE_SIZE, VOCAB)


def guessing(num_pages: int) -> AttentiveRunner:
    """Return a runner that guesses up to MOST_DRAFTS tokens. For jobs without penalties."""
    return AttentiveRunner(num_pages, PAGE_SIZE, VOCAB, MOST_DRAFTS)


class Node:
    """One worker's core and engine. `depth`: how many steps may be planned before the oldest of them is over."""

    def __init__(self, peer: Peer, scheduler: Scheduler, runner: PageRunner, depth: int = 1, **rules: object) -> None:
        self.peer = peer
        self.scheduler = scheduler
        self.runner = runner
        self.run = Isolating(runner.run).run
        self.depth = depth
        key = b"secret of " + peer.worker_id.encode()
        self.core = WorkerCore(scheduler, VOCAB, 64, key, default_rules(**rules))
        self.steps: deque[StepPlan] = deque()


def digest_of(content: bytes) -> int:
    """Return the digest of a page: not negative, as movers' are."""
    return hash(content) % (1 << 64)


class Joined:
    """Cores by name, and everything on its way between them: `streams` by (what, from, to)."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.streams: dict[tuple[str, str, str], deque[object]] = {}
        self.attached: set[tuple[str, str]] = set()  # from a sender to a receiver
        self.is_cut = False  # no stream can be had that does not stand
        self.now_s = 0.0
        self.digest_of: Callable[[bytes], int] = digest_of
        self.breaks_next_copy = False

    def report(self, worker: str, report: object) -> None:
        """Take what a worker reports to its router."""
        raise NotImplementedError

    def queue(self, worker: str, event: Event) -> None:
        """Let a router send this to a worker."""
        self.stream("router", "router", worker).append(event)

    def handle(self, worker: str, event: Event) -> None:
        self.perform(worker, self.nodes[worker].core.handle(event, self.now_s))

    def plan(self, worker: str) -> bool:
        """Plan a step, if one may be."""
        node = self.nodes[worker]
        plan = node.core.plan(self.now_s) if len(node.steps) < node.depth else None
        if plan is not None:
            node.steps.append(plan)
        return plan is not None

    def commit(self, worker: str) -> None:
        node = self.nodes[worker]
        plan = node.steps.popleft()
        self.perform(worker, node.core.commit(plan, node.run(plan), self.now_s))

    def step(self, worker: str) -> bool:
        """Compute a step; False if there is nothing to compute."""
        can_step = self.plan(worker) or bool(self.nodes[worker].steps)
        if can_step:
            self.commit(worker)
        return can_step

    def deliver(self, what: str, source: str, target: str) -> bool:
        """Let the oldest of a stream happen; False if there is nothing in it."""
        stream = self.stream(what, source, target)
        if not stream:
            return False
        item = stream.popleft()
        match item:
            case doors.StartCopy():
                self._copy(source, target, item)
            case doors.CheckDigests():
                self._check(target, item)
            case _:
                self.handle(target, item)
        return True

    def perform(self, worker: str, commands: list[object]) -> None:
        for command in commands:
            match command:
                case doors.Connect(peer):
                    self._connect(worker, peer)
                case doors.StartCopy(peer):
                    self.stream("copies", worker, peer.worker_id).append(command)
                case doors.CheckDigests():
                    self.stream("digests", worker, worker).append(command)
                case doors.ToReceiver(peer, key, message):
                    self.send(worker, peer.worker_id, key, message)
                case doors.ToSender(peer, key, message):
                    if (peer.worker_id, worker) in self.attached:
                        said = doors.ReceiverMessage(self.nodes[worker].peer, key, message)
                        self.stream("answers", worker, peer.worker_id).append(said)
                case _:
                    self.report(worker, command)

    def send(self, source: str, target: str, key: AttemptKey, message: FromSender) -> None:
        if (source, target) in self.attached:
            said = doors.SenderMessage(self.nodes[source].peer, key, message)
            self.stream("hand-offs", source, target).append(said)

    def stream(self, what: str, source: str, target: str) -> deque[object]:
        return self.streams.setdefault((what, source, target), deque())

    def assert_nothing_held(self) -> None:
        for name, node in self.nodes.items():
            node.scheduler.cache.check()
            pool = node.scheduler.cache.pool
            assert node.core.idle, name
            assert pool.num_free == pool.num_pages, name

    def _connect(self, worker: str, peer: Peer) -> None:
        if self.is_cut:
            lost = doors.ReceiverLost(peer, "no answer")
            self.stream("answers", peer.worker_id, worker).append(lost)
        elif (worker, peer.worker_id) not in self.attached:
            self.attached.add((worker, peer.worker_id))
            attached = doors.SenderAttached(self.nodes[worker].peer)
            self.stream("hand-offs", worker, peer.worker_id).append(attached)

    def _copy(self, source: str, target: str, copy: doors.StartCopy) -> None:
        read, write = self.nodes[source].runner.read, self.nodes[target].runner.write
        contents = [read(page) for page in copy.src]
        for page, content in zip(copy.dst, contents, strict=True):
            write(page, content)
        digests = None if self.breaks_next_copy else tuple(map(self.digest_of, contents))
        self.breaks_next_copy = False
        stopped = doors.CopyStopped(digests, "broken by the test")
        self.handle(source, doors.ReceiverMessage(copy.peer, copy.key, stopped))

    def _check(self, worker: str, check: doors.CheckDigests) -> None:
        found = [digest_of(self.nodes[worker].runner.read(page)) for page in check.pages]
        wrong = [place for place, digest in enumerate(check.digests) if digest != found[place]]
        self.handle(worker, doors.DigestsChecked(check.key, wrong[0] if wrong else None))
