"""A prefill core and a decode core, joined by a wire that delivers in any order between streams."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner, expected
from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import SEED_MASK, SEED_STRIDE, Job
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer import doors, sender
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.prefix_hash import PrefixHasher, short_hashes
from pdserve.reports import Failure
from pdserve.router.events import KvChanged, LinkId
from pdserve.router.prefix_index import PrefixIndex, block_hashes
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Failed, Placed, RouterLost, RouterRef, Tokens

VOCAB = 997
PAGE_SIZE = 4
ROUTER = RouterRef(1)
P, D = Peer(WorkerId("p0"), Incarnation(11)), Peer(WorkerId("d0"), Incarnation(22))


def scheduler(num_pages: int, reuse: bool = True, max_num_batched_tokens: int = 8) -> Scheduler:
    hasher = PrefixHasher(b"k" * 32, "model", block_tokens=PAGE_SIZE) if reuse else None
    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, max_model_len=96, eos_token_ids=frozenset()
    )
    return Scheduler(KvCache(num_pages, PAGE_SIZE, hasher), limits)


@dataclass
class Pair:
    """Two workers, the streams between them, and the answers a router would see."""

    rng: random.Random
    prefill_pages: int = 64
    decode_pages: int = 64
    streams: dict[str, deque] = field(default_factory=dict)
    tokens: dict[tuple[HandoffKey, int], dict[int, int]] = field(default_factory=dict)
    finished: set[tuple[HandoffKey, int]] = field(default_factory=set)
    failed: list[Failed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = {name: deque() for name in ("p", "d", "p->d", "d->p", "copies", "digests")}
        self.p_scheduler, self.d_scheduler = scheduler(self.prefill_pages), scheduler(self.decode_pages)
        self.p_runner = FakeRunner(self.prefill_pages, PAGE_SIZE, VOCAB)
        self.d_runner = FakeRunner(self.decode_pages, PAGE_SIZE, VOCAB)
        self.p = WorkerCore(self.p_scheduler, VOCAB, self.p_runner.page_bytes, b"secret", default_rules(max_tasks=64))
        self.d = WorkerCore(self.d_scheduler, VOCAB, 64, b"secret", default_rules())
        self.attached = False

    def place(self, job: Job, handoff: bool = True) -> None:
        """Send both halves of a placement, as a router does: neither waits for the other."""
        if handoff:
            self.streams["p"].append(Placed(ROUTER, job, 1e9, target=D, target_address="address"))
        self.streams["d"].append(Placed(ROUTER, job, 1e9, P if handoff else None))

    def cancel(self, job: Job, indices: tuple[int, ...] = ()) -> None:
        for name in ("p", "d"):
            self.streams[name].append(Cancelled(job.request_id, job.attempt, indices))

    def run(self, steps: int = 100_000) -> None:
        """Let anything that can happen happen, in random order, until nothing can."""
        for _ in range(steps):
            ready = [name for name, stream in self.streams.items() if stream]
            choice = self.rng.choice([*ready, "p step", "d step"])
            if choice.endswith("step"):
                busy = self.step(choice[0])
                if not busy and not ready and not self.step("p") and not self.step("d"):
                    return
            else:
                self.deliver(choice)
        raise AssertionError("it never comes to rest")

    def step(self, who: str) -> bool:
        core, runner = (self.p, self.p_runner) if who == "p" else (self.d, self.d_runner)
        plan = core.plan(0.0)
        if plan is None:
            return False
        self.perform(core.commit(plan, runner.run(plan), 0.0))
        return True

    def deliver(self, name: str) -> None:
        item = self.streams[name].popleft()
        match name:
            case "p" | "d->p":
                self.perform(self.p.handle(item, 0.0))
            case "copies":
                for src, dst in zip(item.src, item.dst, strict=True):
                    self.d_runner.page(dst)[:] = self.p_runner.page(src)
                digests = tuple(hash(bytes(self.p_runner.page(src))) for src in item.src)
                self.stop_copy(item, sender.CopyStopped(digests))
            case "digests":
                found = [hash(bytes(self.d_runner.page(page))) for page in item.pages]
                wrong = [i for i, digest in enumerate(item.digests) if digest != found[i]]
                self.perform(self.d.handle(doors.DigestsChecked(item.key, wrong[0] if wrong else None), 0.0))
            case _:
                self.perform(self.d.handle(item, 0.0))

    def stop_copy(self, item: doors.Copy, stopped: sender.CopyStopped) -> None:
        self.perform(self.p.handle(doors.ReceiverSaid(item.peer, item.key, stopped), 0.0))

    def perform(self, commands: list) -> None:
        for command in commands:
            match command:
                case Tokens():
                    self.hear(command)
                case Failed(_, key):
                    if not any(key == finished for finished, _ in self.finished):  # else its first token was its last
                        self.failed.append(command)
                case doors.Connect():
                    if not self.attached:
                        self.attached = True
                        self.streams["p->d"].append(doors.SenderAttached(P))
                case doors.Copy():
                    self.streams["copies"].append(command)
                case doors.CheckDigests():
                    self.streams["digests"].append(command)
                case doors.ToReceiver() | doors.ToSender():
                    self.carry(command)

    def hear(self, tokens: Tokens) -> None:
        drawn = self.tokens.setdefault((tokens.key, tokens.index), {})
        known = drawn.get(tokens.position)  # both ends of a hand-off report a first token
        assert known in (None, tokens.token.token_id), "a position was reported twice, and differs"
        drawn[tokens.position] = tokens.token.token_id
        if tokens.finish is not None:
            assert (tokens.key, tokens.index) not in self.finished
            self.finished.add((tokens.key, tokens.index))

    def carry(self, command: doors.ToReceiver | doors.ToSender) -> None:
        match command:
            case doors.ToReceiver(_, key, message):
                self.streams["p->d"].append(doors.SenderSaid(P, key, message))
            case doors.ToSender(_, key, message):
                self.streams["d->p"].append(doors.ReceiverSaid(D, key, message))

    def output(self, job: Job, index: int) -> list[int]:
        drawn = self.tokens.get((HandoffKey(job.request_id, job.attempt), index), {})
        return [drawn[position] for position in sorted(drawn)]


def job(number: int, prompt: list[int], max_tokens: int = 8, **params: int) -> Job:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number, **params)
    indices = tuple(range(sampling.n))
    return Job(RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), sampling, indices)


def wanted(job: Job, index: int) -> list[int]:
    seed = (job.params.seed + index * SEED_STRIDE) & SEED_MASK
    return expected(job.token_ids, seed, job.params.max_tokens, VOCAB)


def assert_nothing_held(pair: Pair) -> None:
    for core, scheduler in ((pair.p, pair.p_scheduler), (pair.d, pair.d_scheduler)):
        scheduler.cache.check()
        assert core.idle
        assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_pages


@pytest.mark.parametrize("seed", range(40))
def test_every_order_of_news_gives_the_tokens_of_one_engine(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng, decode_pages=rng.choice([24, 40, 64]))
    common = [rng.randrange(VOCAB) for _ in range(9)]
    jobs = []
    for number in range(12):
        prompt = common[: rng.randrange(10)] + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 4, 5, 17, 30]))]
        jobs.append(job(number, prompt, max_tokens=rng.choice([1, 2, 9, 20]), n=rng.choice([1, 1, 1, 3])))
        pair.place(jobs[-1], handoff=rng.random() < 0.8)
    pair.run()
    assert not pair.failed
    for each in jobs:
        for index in each.indices:
            assert pair.output(each, index) == wanted(each, index)
    assert_nothing_held(pair)


@pytest.mark.parametrize("seed", range(60))
def test_a_cancel_at_any_moment_frees_every_page_and_disturbs_nobody(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng)
    jobs = [job(i, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))], n=rng.choice([1, 2])) for i in range(6)]
    for each in jobs:
        pair.place(each, handoff=rng.random() < 0.8)
    doomed = jobs[:3]
    for each in doomed:
        for _ in range(rng.randrange(60)):
            ready = [name for name, stream in pair.streams.items() if stream]
            if ready and rng.random() < 0.7:
                pair.deliver(rng.choice(ready))
            else:
                pair.step(rng.choice("pd"))
        pair.cancel(each)
    pair.run()
    for each in jobs[3:]:
        for index in each.indices:
            assert pair.output(each, index) == wanted(each, index)
    assert_nothing_held(pair)


def test_a_cancelled_continuation_ends_and_its_sibling_goes_on() -> None:
    pair = Pair(random.Random(0))
    both = job(1, [5, 6, 7], max_tokens=12, n=2)
    pair.place(both)
    while len(pair.output(both, 1)) < 3:
        for name in [name for name, stream in pair.streams.items() if stream]:
            pair.deliver(name)
        pair.step("p")
        pair.step("d")
    pair.cancel(both, indices=(1,))
    pair.run()
    assert pair.output(both, 0) == wanted(both, 0)
    assert len(pair.output(both, 1)) < 12
    assert_nothing_held(pair)


def test_pages_that_late_bytes_may_reach_come_back_with_the_senders_process_alone() -> None:
    pair = Pair(random.Random(0))
    lost = job(1, list(range(1, 31)))
    pair.place(lost)
    while not pair.streams["copies"]:
        for name in [name for name, stream in pair.streams.items() if stream]:
            pair.deliver(name)
        pair.step("p")
    pair.stop_copy(pair.streams["copies"].popleft(), sender.CopyStopped(None, "reset", in_doubt=True))
    (failed,) = pair.failed
    assert failed.code is Failure.TRANSFER_FAILED
    pair.cancel(lost)
    pair.run()
    assert pair.p.idle
    pool = pair.d_scheduler.cache.pool
    assert pool.num_quarantined == 8
    pair.perform(pair.d.handle(doors.SenderLost(P, "reset"), 0.0))
    pair.perform(pair.d.handle(doors.SenderAttached(P), 0.0))  # asks again
    pair.run()
    assert pool.num_quarantined == 8
    pair.perform(pair.d.handle(PeerGone(P), 0.0))
    assert_nothing_held(pair)


def test_a_lost_router_frees_what_it_asked_for() -> None:
    pair = Pair(random.Random(0))
    pair.place(job(1, [1, 2, 3, 4, 5], max_tokens=50))
    for _ in range(4):
        pair.step("p")
        for name in [name for name, stream in pair.streams.items() if stream]:
            pair.deliver(name)
    pair.streams["p"].append(RouterLost(ROUTER))
    pair.streams["d"].append(RouterLost(ROUTER))
    pair.run()
    assert_nothing_held(pair)


def test_a_lost_sender_leaves_its_pages_quarantined_until_its_process_is_gone() -> None:
    pair = Pair(random.Random(0))
    pair.place(job(1, list(range(20))))
    pair.deliver("d")
    pair.deliver("p")
    pair.deliver("p->d")  # the stream stands, the grant is on its way
    pair.perform(pair.d.handle(doors.SenderLost(P, "reset"), 0.0))
    pool = pair.d_scheduler.cache.pool
    assert [failed.code.name for failed in pair.failed] == ["PEER_LOST"]
    assert pool.num_quarantined == 5
    assert pool.num_free == pool.num_pages - 5
    pair.perform(pair.d.handle(PeerGone(P), 0.0))
    assert pool.num_free == pool.num_pages


def test_decode_pages_that_run_out_are_taken_from_the_latest_and_nobody_gets_another_answer() -> None:
    pair = Pair(random.Random(3), decode_pages=16)
    jobs = [job(i, [i + 1] * 7, max_tokens=30) for i in range(4)]
    for each in jobs:
        pair.place(each)
    pair.run()
    assert pair.d_scheduler.num_preemptions > 0
    for each in jobs:
        assert pair.output(each, 0) == wanted(each, 0)
    assert_nothing_held(pair)


def test_a_shared_prompt_is_neither_computed_nor_sent_twice() -> None:
    pair = Pair(random.Random(0))
    prompt = list(range(32))
    pair.place(job(1, prompt))
    pair.run()
    pair.place(job(2, [*prompt, 1, 2]))
    copied = 0
    perform = pair.perform

    def count(commands: list) -> None:
        nonlocal copied
        copied += sum(len(c.src) for c in commands if isinstance(c, doors.Copy))
        perform(commands)

    pair.perform = count
    pair.run()
    assert copied == 1
    assert pair.output(job(2, [*prompt, 1, 2]), 0) == wanted(job(2, [*prompt, 1, 2]), 0)


def test_a_router_finds_prompt_and_answer_on_the_decode_worker_for_the_next_turn() -> None:
    pair, link, now_s = Pair(random.Random(0)), LinkId(1), 0.0
    first = job(1, list(range(1, 12)), max_tokens=20)
    pair.place(first)
    pair.run()
    cache = pair.d_scheduler.cache
    index = PrefixIndex(PrefixHasher(b"k" * 32, "model", block_tokens=PAGE_SIZE))
    index.attach(link, PAGE_SIZE, 64)
    index.apply(KvChanged(link, stored=short_hashes(b"".join(cache.pages))))
    conversation = [*first.token_ids, *pair.output(first, 0)]
    num_computed = len(conversation) - 1  # nobody asked for what follows the last token
    num_held = num_computed // PAGE_SIZE * PAGE_SIZE
    hashes = block_hashes(index.hasher, [*conversation, 5, 6, 7, 8, 9], "")
    assert index.match(hashes, now_s) == {link: num_held}
    assert index.reported(link, hashes) == num_held
    second = job(2, [*conversation, 5, 6, 7, 8, 9])
    reused = cache.reuse(Prefix(second.token_ids, ""), 100)
    assert len(reused) * PAGE_SIZE == num_held  # what the router believes is what the worker has
    cache.pool.release(reused)
    assert_nothing_held(pair)
