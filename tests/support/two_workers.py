"""Workers' cores, and a client that takes each position once, as routers do."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from joined_cores import PAGE_SIZE, ROUTER, Joined, Node, PageRunner, attentive

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Commit, FromSender, Withdrawn
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import SampledToken, SamplingParams
from pdserve.worker.messages import Cancelled, Event, Failed, MoveAsked, Placed, Progress, Tokens

FAR_S = 1e9
NewRunner = Callable[[int], PageRunner]  # with so many pages


def new_scheduler(
    num_pages: int, max_num_seqs: int = 8, eos: frozenset[int] = frozenset(), most_drafts: int = 0
) -> Scheduler:
    hasher = PrefixHasher(b"k" * 32, "model", block_tokens=PAGE_SIZE)
    return Scheduler(KvCache(num_pages, Paging.of(PAGE_SIZE), hasher), Limits(max_num_seqs, 16, 96, eos, most_drafts))


def new_job(number: int, prompt: list[int], **params: object) -> Job:
    settings = SamplingParams(seed=number, **params)  # type: ignore[arg-type]
    return Job(
        RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), settings, tuple(range(settings.n))
    )


def alone(job: Job, new_runner: NewRunner = attentive) -> dict[int, list[SampledToken]]:
    """Return what one engine that nothing disturbs samples for a job."""
    scheduler, runner = new_scheduler(64), new_runner(64)
    scheduler.add(EngineSequence(job, job.indices, list(job.token_ids), order=0))
    sampled: dict[int, list[SampledToken]] = {index: [] for index in job.indices}
    while (plan := scheduler.plan()) is not None:
        for outcome in scheduler.commit(plan, runner.run(plan)):
            if hasattr(outcome, "tokens"):
                sampled[outcome.index].extend(outcome.tokens)
    return sampled


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


class Workers(Joined):
    """Workers by name, and a client."""

    def __init__(
        self,
        rng: random.Random | None = None,
        num_pages: dict[str, int] | None = None,
        depth: int = 1,
        new_runner: NewRunner = attentive,
        most_drafts: int = 0,
        **rules: object,
    ) -> None:
        """`most_drafts`: guesses of the runners, at most."""
        sizes = enumerate((num_pages or {"s": 64, "t": 64}).items(), 11)
        peers = {name: (Peer(WorkerId(name), Incarnation(number)), size) for number, (name, size) in sizes}
        super().__init__(
            {
                name: Node(peer, new_scheduler(size, most_drafts=most_drafts), new_runner(size), depth, **rules)
                for name, (peer, size) in peers.items()
            }
        )
        self.rng = rng or random.Random(0)
        self.lost: set[tuple[str, str]] = set()
        self.attempts: Counter[RequestId] = Counter()  # the greatest of each
        self.answers: dict[tuple[RequestId, int], Answer] = {}
        self.reports: list[tuple[str, Tokens | Progress | Failed]] = []  # of each worker, in order
        self.committed: dict[tuple[RequestId, int], str] = {}  # who may compute it alone, from when its commit left

    # ---- what a router does

    def start(self, job: Job, worker: str = "s") -> None:
        """Place a request whole on one worker."""
        for index in job.indices:
            self.answers[job.request_id, index] = Answer(job, job.attempt, worker)
        self.queue(worker, Placed(ROUTER, job, FAR_S))

    def move(self, job: Job, index: int = 0, target: str = "t", extra_tokens: int = 24) -> AttemptKey:
        """Ask for a move of a continuation: the target gets it as a new attempt, with what has been delivered."""
        answer = self.answers[job.request_id, index]
        attempt = self._next_attempt(job.request_id)
        answer.shadow = attempt, target
        known = (*job.token_ids, *(token.token_id for token in answer.tokens))
        source = self.nodes[answer.worker]
        shadow = replace(job, attempt=attempt, token_ids=known, indices=(index,))
        self.queue(target, Placed(ROUTER, shadow, FAR_S, source.peer, extra_tokens=extra_tokens))
        key, peer = AttemptKey(job.request_id, answer.attempt), self.nodes[target].peer
        self.queue(answer.worker, MoveAsked(ROUTER, key, index, attempt, peer, "address", len(known)))
        return AttemptKey(job.request_id, attempt)

    def _next_attempt(self, request_id: RequestId) -> Attempt:
        self.attempts[request_id] += 1
        return Attempt(self.attempts[request_id])

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
        if isinstance(event, doors.ReceiverMessage) and isinstance(event.event, Withdrawn):
            self.committed = {each: name for each, name in self.committed.items() if each[0] != event.key.request_id}
        super().handle(worker, event)

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
        self.stream("hand-offs", source, target).clear()
        self.stream("answers", target, source).clear()
        self.stream("answers", target, source).append(doors.ReceiverLost(self.nodes[target].peer, "reset"))
        self.stream("hand-offs", source, target).append(doors.SenderLost(self.nodes[source].peer, "reset"))

    def attach_again(self) -> None:
        """Let the streams stand again that were lost."""
        for source, target in self.lost - self.attached:
            self.attached.add((source, target))
            self.stream("hand-offs", source, target).append(doors.SenderAttached(self.nodes[source].peer))
        self.lost.clear()

    # ---- how

    def send(self, source: str, target: str, key: AttemptKey, message: FromSender) -> None:
        if isinstance(message, Commit):
            for tail in message.capsule.tails:
                self.committed[key.request_id, tail.index] = target
        super().send(source, target, key, message)

    def report(self, worker: str, report: object) -> None:
        if not isinstance(report, Tokens | Progress | Failed):
            return
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
        answer.tokens.extend(tokens.tokens)
        answer.is_finished |= tokens.finish is not None
        if answer.is_finished and answer.shadow is not None:
            self.queue(answer.shadow[1], Cancelled(request_id, answer.shadow[0], (tokens.index,)))

    def _take_charge(self, answer: Answer, request_id: RequestId, index: int) -> None:
        if not answer.is_lost:
            self.queue(answer.worker, Cancelled(request_id, answer.attempt, (index,)))
        answer.attempt, answer.worker = answer.shadow or (answer.attempt, answer.worker)
        answer.shadow, answer.is_lost = None, False
