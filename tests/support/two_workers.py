"""Workers' real cores, the streams between them, and a client that takes each position once, as routers do.

Everything that happens between two workers waits in a stream until the test lets it happen. A step writes to pages
when it is committed, so that whatever reads them too early sees another KV.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol
from zlib import crc32

from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import Chunk, SampleSpec, StepPlan, StepResult
from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer import doors, sender
from pdserve.kvtransfer.session import Commit, FromSender, HandoffKey, Peer, Withdrawn
from pdserve.prefix_hash import PrefixHasher
from pdserve.reports import Stage
from pdserve.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Event, Failed, MoveAsked, Placed, Progress, RouterRef, Tokens

VOCAB = 997
PAGE_SIZE = 4
ROUTER = RouterRef(1)
FAR_S = 1e9


class PageRunner(Protocol):
    """Computes steps on pages that a test can read and write."""

    def run(self, plan: StepPlan) -> StepResult: ...
    def read(self, page: PageId) -> bytes: ...
    def write(self, page: PageId, content: bytes) -> None: ...


NewRunner = Callable[[int], PageRunner]  # with so many pages


class AttentiveRunner(FakeRunner):
    """Samples tokens that depend on all that a sampler looks at, and knows those of the step before.

    Each has a log probability that depends on it, where they are asked for.
    """

    _sampled: tuple[tuple[SampledToken, ...], ...] = ()

    def run(self, plan: StepPlan) -> StepResult:
        chunks = tuple(map(self._fill_in, plan.chunks))
        result = super().run(replace(plan, chunks=chunks))
        pairs = zip(chunks, result.tokens, strict=True)
        self._sampled = tuple([_attend(chunk.samples, tokens) for chunk, tokens in pairs])
        return replace(result, tokens=self._sampled)

    def _fill_in(self, chunk: Chunk) -> Chunk:
        if chunk.previous is None:
            return chunk
        (token,) = self._sampled[chunk.previous]
        return replace(chunk, token_ids=(token.token_id,))

    def read(self, page: PageId) -> bytes:
        return bytes(self.page(page))

    def write(self, page: PageId, content: bytes) -> None:
        self.page(page)[:] = content


def _attend(samples: tuple[SampleSpec, ...], tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    return tuple([_with_penalties(spec, token) for spec, token in zip(samples, tokens, strict=True)])


def _with_penalties(spec: SampleSpec, token: SampledToken) -> SampledToken:
    before = b"%d %d %d" % (sum(spec.prompt_ids), sum(spec.output_ids), spec.forbid_stops)
    has_influence = spec.params.has_penalties or spec.forbid_stops
    token_id = crc32(before, token.token_id) % VOCAB if has_influence else token.token_id
    logprobs = TokenLogprobs(-float(token_id + spec.index), ()) if spec.params.logprobs is not None else None
    return SampledToken(token_id, logprobs)


def new_scheduler(num_pages: int, max_num_seqs: int = 8, eos: frozenset[int] = frozenset()) -> Scheduler:
    hasher = PrefixHasher(b"k" * 32, "model", block_tokens=PAGE_SIZE)
    return Scheduler(KvCache(num_pages, PAGE_SIZE, hasher), Limits(max_num_seqs, 16, 96, eos))


def new_job(number: int, prompt: list[int], **params: object) -> Job:
    settings = SamplingParams(seed=number, **params)  # type: ignore[arg-type]
    return Job(
        RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), settings, tuple(range(settings.n))
    )


def attentive(num_pages: int) -> AttentiveRunner:
    return AttentiveRunner(num_pages, PAGE_SIZE, VOCAB)


def alone(job: Job, new_runner: NewRunner = attentive) -> dict[int, list[SampledToken]]:
    """Return what one engine that nothing disturbs samples for a job."""
    scheduler, runner = new_scheduler(64), new_runner(64)
    scheduler.add(EngineSequence(job, job.indices, list(job.token_ids), order=0))
    sampled: dict[int, list[SampledToken]] = {index: [] for index in job.indices}
    while (plan := scheduler.plan()) is not None:
        for outcome in scheduler.commit(plan, runner.run(plan)):
            if hasattr(outcome, "token"):
                sampled[outcome.index].append(outcome.token)
    return sampled


class Node:
    """One worker. `depth`: how many steps may be planned before the oldest of them is over."""

    def __init__(self, name: str, incarnation: int, runner: PageRunner, num_pages: int, depth: int) -> None:
        self.peer = Peer(WorkerId(name), Incarnation(incarnation))
        self.scheduler = new_scheduler(num_pages)
        self.runner = runner
        self.depth = depth
        key = b"secret of " + name.encode()
        self.core = WorkerCore(self.scheduler, VOCAB, 64, key, default_rules())
        self.steps: deque[StepPlan] = deque()


@dataclass
class Answer:
    """One continuation as its client sees it, and the attempt in charge of it."""

    job: Job
    attempt: Attempt
    worker: str
    tokens: list[SampledToken] = field(default_factory=list)
    shadow: tuple[Attempt, str] | None = None
    is_finished: bool = False
    is_lost: bool = False  # failed, and waits for its shadow or to be placed again


@dataclass
class Workers:
    """Workers by name, and everything on its way between them: `streams` by (what, from, to)."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_pages: dict[str, int] = field(default_factory=lambda: {"s": 64, "t": 64})
    depth: int = 1
    new_runner: NewRunner = attentive

    def __post_init__(self) -> None:
        sizes = enumerate(self.num_pages.items(), 11)
        self.nodes = {name: Node(name, n, self.new_runner(size), size, self.depth) for n, (name, size) in sizes}
        self.streams: dict[tuple[str, str, str], deque[object]] = {}
        self.attached: set[tuple[str, str]] = set()  # from a sender to a receiver
        self.lost: set[tuple[str, str]] = set()
        self.is_cut = False  # no stream can be had that does not stand
        self.now_s = 0.0
        self.attempts: Counter[RequestId] = Counter()  # the greatest of each
        self.answers: dict[tuple[RequestId, int], Answer] = {}
        self.reports: list[tuple[str, Tokens | Progress | Failed]] = []  # of each worker, in order
        self.committed: dict[tuple[RequestId, int], str] = {}  # who may compute it alone, from when its commit left
        self.digest_of: Callable[[bytes], int] = hash
        self.breaks_next_copy = False

    # ---- what a router does

    def start(self, job: Job, worker: str = "s") -> None:
        """Place a request whole on one worker."""
        for index in job.indices:
            self.answers[job.request_id, index] = Answer(job, job.attempt, worker)
        self.queue(worker, Placed(ROUTER, job, FAR_S))

    def move(self, job: Job, index: int = 0, target: str = "t", extra_tokens: int = 24) -> HandoffKey:
        """Ask for a move of a continuation: the target gets it as a new attempt, with what has been delivered."""
        answer = self.answers[job.request_id, index]
        attempt = self._next_attempt(job.request_id)
        answer.shadow = attempt, target
        known = (*job.token_ids, *(token.token_id for token in answer.tokens))
        source = self.nodes[answer.worker]
        shadow = replace(job, attempt=attempt, token_ids=known, indices=(index,))
        self.queue(target, Placed(ROUTER, shadow, FAR_S, source.peer, extra_tokens=extra_tokens))
        key, peer = HandoffKey(job.request_id, answer.attempt), self.nodes[target].peer
        self.queue(answer.worker, MoveAsked(ROUTER, key, index, attempt, peer, "address", len(known)))
        return HandoffKey(job.request_id, attempt)

    def _next_attempt(self, request_id: RequestId) -> Attempt:
        self.attempts[request_id] += 1
        return Attempt(self.attempts[request_id])

    def queue(self, worker: str, event: Event) -> None:
        self._stream("router", "router", worker).append(event)

    def place_lost(self) -> None:
        """Place again, whole, what has failed and has no shadow left to wait for."""
        for (request_id, index), answer in self.answers.items():
            if answer.is_lost and answer.shadow is None:
                answer.is_lost = False
                self.committed.pop((request_id, index), None)
                answer.attempt, answer.worker = self._next_attempt(request_id), "s"
                known = (*answer.job.token_ids, *(token.token_id for token in answer.tokens))
                job = replace(answer.job, attempt=answer.attempt, token_ids=known, indices=(index,))
                self.queue("s", Placed(ROUTER, job, FAR_S))

    def output(self, job: Job, index: int = 0) -> list[SampledToken]:
        return self.answers[job.request_id, index].tokens

    # ---- what happens

    def handle(self, worker: str, event: Event) -> None:
        if isinstance(event, doors.ReceiverSaid) and isinstance(event.event, Withdrawn):
            self.committed = {each: name for each, name in self.committed.items() if each[0] != event.key.request_id}
        self._perform(worker, self.nodes[worker].core.handle(event, self.now_s))

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
        self._perform(worker, node.core.commit(plan, node.runner.run(plan), self.now_s))

    def step(self, worker: str) -> None:
        if self.plan(worker) or self.nodes[worker].steps:
            self.commit(worker)

    def deliver(self, what: str, source: str, target: str) -> bool:
        """Let the oldest of a stream happen; False if there is nothing in it."""
        stream = self._stream(what, source, target)
        if not stream:
            return False
        item = stream.popleft()
        match what:
            case "copies":
                self._copy(source, target, item)
            case "digests":
                self._check(target, item)
            case _:
                self.handle(target, item)
        return True

    def deliver_all(self) -> None:
        """Let everything happen that is on its way, but no step."""
        while waiting := [name for name, stream in self.streams.items() if stream]:
            for name in waiting:
                self.deliver(*name)

    def steps_of(self, worker: str, count: int) -> None:
        for _ in range(count):
            self.deliver_all()
            self.step(worker)
        self.deliver_all()

    def run(self, limit: int = 20_000) -> None:
        """Let anything that can happen happen, in random order, until nothing can."""
        for _ in range(limit):
            if not self.anything():
                return
        raise AssertionError("it never comes to rest")

    def anything(self) -> bool:
        """Let one of the things happen that can; False if nothing can."""
        ready: list[Callable[[], object]] = []
        for name, stream in self.streams.items():
            if stream:
                ready.append(lambda name=name: self.deliver(*name))
        for name, node in self.nodes.items():
            if node.steps:
                ready.append(lambda name=name: self.commit(name))
        can_plan = [name for name in self.nodes if self.rng.random() < 0.5 or not ready]
        if any(self.plan(name) for name in can_plan):
            return True
        if ready:
            self.rng.choice(ready)()
            return True
        self.place_lost()
        return any(self.streams.values())

    def lose_stream(self, source: str, target: str) -> None:
        """End the stream from a sender to a receiver: what is on it is lost. Each end notices when it is delivered."""
        self.attached.discard((source, target))
        self.lost.add((source, target))
        self._stream("hand-offs", source, target).clear()
        self._stream("answers", target, source).clear()
        self._stream("answers", target, source).append(doors.ReceiverLost(self.nodes[target].peer, "reset"))
        self._stream("hand-offs", source, target).append(doors.SenderLost(self.nodes[source].peer, "reset"))

    def attach_again(self) -> None:
        """Let the streams stand again that were lost."""
        for source, target in self.lost - self.attached:
            self.attached.add((source, target))
            self._stream("hand-offs", source, target).append(doors.SenderAttached(self.nodes[source].peer))
        self.lost.clear()

    def assert_nothing_held(self) -> None:
        for name, node in self.nodes.items():
            node.scheduler.cache.check()
            pool = node.scheduler.cache.pool
            assert node.core.idle, name
            assert pool.num_free == pool.num_pages, name

    # ---- how

    def _stream(self, what: str, source: str, target: str) -> deque[object]:
        return self.streams.setdefault((what, source, target), deque())

    def _copy(self, source: str, target: str, copy: doors.Copy) -> None:
        read, write = self.nodes[source].runner.read, self.nodes[target].runner.write
        contents = [read(page) for page in copy.src]
        for page, content in zip(copy.dst, contents, strict=True):
            write(page, content)
        digests = None if self.breaks_next_copy else tuple(map(self.digest_of, contents))
        self.breaks_next_copy = False
        stopped = sender.CopyStopped(digests, "broken by the test")
        self.handle(source, doors.ReceiverSaid(copy.peer, copy.key, stopped))

    def _check(self, worker: str, check: doors.CheckDigests) -> None:
        found = [hash(self.nodes[worker].runner.read(page)) for page in check.pages]
        wrong = [place for place, digest in enumerate(check.digests) if digest != found[place]]
        self.handle(worker, doors.DigestsChecked(check.key, wrong[0] if wrong else None))

    def _perform(self, worker: str, commands: list[object]) -> None:
        for command in commands:
            match command:
                case Tokens() | Progress() | Failed():
                    self._report(worker, command)
                case doors.Connect(peer):
                    self._connect(worker, peer)
                case doors.Copy(peer):
                    self._stream("copies", worker, peer.worker_id).append(command)
                case doors.CheckDigests():
                    self._stream("digests", worker, worker).append(command)
                case doors.ToReceiver(peer, key, message):
                    self._send(worker, peer.worker_id, key, message)
                case doors.ToSender(peer, key, message):
                    if (peer.worker_id, worker) in self.attached:
                        said = doors.ReceiverSaid(self.nodes[worker].peer, key, message)
                        self._stream("answers", worker, peer.worker_id).append(said)

    def _connect(self, worker: str, peer: Peer) -> None:
        if self.is_cut:
            lost = doors.ReceiverLost(peer, "no answer")
            self._stream("answers", peer.worker_id, worker).append(lost)
        elif (worker, peer.worker_id) not in self.attached:
            self.attached.add((worker, peer.worker_id))
            attached = doors.SenderAttached(self.nodes[worker].peer)
            self._stream("hand-offs", worker, peer.worker_id).append(attached)

    def _send(self, source: str, target: str, key: HandoffKey, message: FromSender) -> None:
        if isinstance(message, Commit):
            for tail in message.capsule.tails:
                self.committed[key.request_id, tail.index] = target
        if (source, target) in self.attached:
            said = doors.SenderSaid(self.nodes[source].peer, key, message)
            self._stream("hand-offs", source, target).append(said)

    def _report(self, worker: str, report: Tokens | Progress | Failed) -> None:
        self.reports.append((worker, report))
        request_id, attempt = report.key
        if isinstance(report, Tokens):
            if (request_id, report.index) in self.answers:
                self._take(worker, report, self.answers[request_id, report.index])
            return
        for (known, index), answer in self.answers.items():
            is_shadow = known == request_id and answer.shadow is not None and answer.shadow[0] == attempt
            if isinstance(report, Progress):
                if is_shadow and report.stage is Stage.COMMITTED:
                    self._take_charge(answer, request_id, index)
            elif is_shadow:
                _, target = answer.shadow or (attempt, worker)
                answer.shadow = None
                if worker != target:
                    self.queue(target, Cancelled(request_id, attempt, (index,)))
            elif known == request_id and answer.attempt == attempt and not answer.is_finished:
                answer.is_lost = True

    def _take(self, worker: str, tokens: Tokens, answer: Answer) -> None:
        """Take a position that the attempt in charge is the first to report."""
        request_id, attempt = tokens.key
        owner = self.committed.get((request_id, tokens.index), worker)
        assert owner == worker, f"{worker} computes what it has committed to {owner}"
        if attempt != answer.attempt or answer.is_lost or tokens.position < len(answer.tokens):
            return
        assert tokens.position == len(answer.tokens), "a position is missing"
        answer.tokens.append(tokens.token)
        answer.is_finished |= tokens.finish is not None
        if answer.is_finished and answer.shadow is not None:
            self.queue(answer.shadow[1], Cancelled(request_id, answer.shadow[0], (tokens.index,)))

    def _take_charge(self, answer: Answer, request_id: RequestId, index: int) -> None:
        if not answer.is_lost:
            self.queue(answer.worker, Cancelled(request_id, answer.attempt, (index,)))
        answer.attempt, answer.worker = answer.shadow or (answer.attempt, answer.worker)
        answer.shadow, answer.is_lost = None, False
