"""A prefill core and a decode core, joined by streams that deliver in any order between them."""

import random

import pytest
from joined_cores import PAGE_SIZE, ROUTER, VOCAB, Node, attentive
from wired_cores import WiredCores

from faultsim.engine import expected
from pdserve.base.ids import Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import SEED_MASK, SEED_STRIDE, Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import PeerGone
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import EVERYONE, PrefixHasher, short_hashes
from pdserve.protocol.reports import Failure
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.placement.prefix_index import PrefixIndex, block_hashes
from pdserve.router.requests.events import KvChanged, LinkId
from pdserve.worker.messages import Cancelled, Failed, Placed, RouterLost, Tokens

P, D = Peer(WorkerId("p"), Incarnation(11)), Peer(WorkerId("d"), Incarnation(22))


def scheduler(num_pages: int, reuse: bool = True, max_num_batched_tokens: int = 8) -> Scheduler:
    hasher = PrefixHasher(b"k" * 32, "model", block_tokens=PAGE_SIZE) if reuse else None
    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, max_model_len=96, eos_token_ids=frozenset()
    )
    return Scheduler(KvCache(num_pages, Paging.of(PAGE_SIZE), hasher), limits)


class Pair(WiredCores):
    """A worker that computes prompts, and one that decodes them."""

    def __init__(self, rng: random.Random, decode_pages: int = 64) -> None:
        self.rng = rng
        self.prefill = Node(P, scheduler(64), attentive(64), max_tasks=64)
        self.decode = Node(D, scheduler(decode_pages), attentive(decode_pages))
        super().__init__({"p": self.prefill, "d": self.decode})

    def start(self, each: Job, handoff: bool = True) -> None:
        if handoff:
            self.place(each, "p", "d")
        else:
            self.queue("d", Placed(ROUTER, each, 1e9))

    def cancel(self, each: Job, indices: tuple[int, ...] = ()) -> None:
        for name in ("p", "d"):
            self.queue(name, Cancelled(each.request_id, each.attempt, indices))

    def report(self, worker: str, report: object) -> None:
        if isinstance(report, Failed) and any(report.key == finished for finished, _ in self.finished):
            return  # its first token was its last
        if isinstance(report, Tokens) and report.finish is not None:
            assert (report.key, report.index) not in self.finished
        super().report(worker, report)

    def deliver_some(self) -> None:
        """Let the next thing of each stream arrive."""
        for name in [name for name, stream in self.streams.items() if stream]:
            self.deliver(*name)


def job(number: int, prompt: list[int], max_tokens: int = 8, **params: int) -> Job:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number, **params)
    indices = tuple(range(sampling.n))
    return Job(RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), sampling, indices)


def wanted(job: Job, index: int) -> list[int]:
    seed = (job.params.seed + index * SEED_STRIDE) & SEED_MASK
    return expected(job.token_ids, seed, job.params.max_tokens, VOCAB)


@pytest.mark.parametrize("seed", range(40))
def test_every_order_of_news_gives_the_tokens_of_one_engine(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng, decode_pages=rng.choice([24, 40, 64]))
    common = [rng.randrange(VOCAB) for _ in range(9)]
    jobs = []
    for number in range(12):
        prompt = common[: rng.randrange(10)] + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 4, 5, 17, 30]))]
        jobs.append(job(number, prompt, max_tokens=rng.choice([1, 2, 9, 20]), n=rng.choice([1, 1, 1, 3])))
        pair.start(jobs[-1], handoff=rng.random() < 0.8)
    pair.run(pair.rng)
    assert not pair.failed
    for each in jobs:
        for index in each.indices:
            assert pair.output(each, index) == wanted(each, index)
    pair.assert_nothing_held()


@pytest.mark.parametrize("seed", range(60))
def test_a_cancel_at_any_moment_frees_every_page_and_disturbs_nobody(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng)
    jobs = [job(i, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))], n=rng.choice([1, 2])) for i in range(6)]
    for each in jobs:
        pair.start(each, handoff=rng.random() < 0.8)
    doomed = jobs[:3]
    for each in doomed:
        for _ in range(rng.randrange(60)):
            ready = [name for name, stream in pair.streams.items() if stream]
            if ready and rng.random() < 0.7:
                pair.deliver(*rng.choice(ready))
            else:
                pair.step(rng.choice("pd"))
        pair.cancel(each)
    pair.run(pair.rng)
    for each in jobs[3:]:
        for index in each.indices:
            assert pair.output(each, index) == wanted(each, index)
    pair.assert_nothing_held()


def test_a_cancelled_continuation_ends_and_its_sibling_goes_on() -> None:
    pair = Pair(random.Random(0))
    both = job(1, [5, 6, 7], max_tokens=12, n=2)
    pair.start(both)
    while len(pair.output(both, 1)) < 3:
        pair.deliver_some()
        pair.step("p")
        pair.step("d")
    pair.cancel(both, indices=(1,))
    pair.run(pair.rng)
    assert pair.output(both, 0) == wanted(both, 0)
    assert len(pair.output(both, 1)) < 12
    pair.assert_nothing_held()


def test_pages_that_late_bytes_may_reach_come_back_with_the_senders_process_alone() -> None:
    pair = Pair(random.Random(0))
    lost = job(1, list(range(1, 31)))
    pair.start(lost)
    while not pair.stream("copies", "p", "d"):
        pair.deliver_some()
        pair.step("p")
    copy = pair.stream("copies", "p", "d").popleft()
    pair.handle("p", doors.ReceiverMessage(D, copy.key, doors.CopyStopped(None, "reset", in_doubt=True)))
    (failed,) = pair.failed
    assert failed.code is Failure.TRANSFER_FAILED
    pair.cancel(lost)
    pair.run(pair.rng)
    assert pair.prefill.core.idle
    pool = pair.decode.scheduler.cache.pool
    assert pool.num_quarantined == 8
    pair.handle("d", doors.SenderLost(P, "reset"))
    pair.handle("d", doors.SenderAttached(P))  # asks again
    pair.run(pair.rng)
    assert pool.num_quarantined == 8
    pair.handle("d", PeerGone(P))
    pair.assert_nothing_held()


def test_a_lost_router_frees_what_it_asked_for() -> None:
    pair = Pair(random.Random(0))
    pair.start(job(1, [1, 2, 3, 4, 5], max_tokens=50))
    for _ in range(4):
        pair.step("p")
        pair.deliver_some()
    pair.queue("p", RouterLost(ROUTER))
    pair.queue("d", RouterLost(ROUTER))
    pair.run(pair.rng)
    pair.assert_nothing_held()


def test_a_lost_sender_leaves_its_pages_quarantined_until_its_process_is_gone() -> None:
    pair = Pair(random.Random(0))
    pair.start(job(1, list(range(20))))
    pair.deliver("router", "router", "d")
    pair.deliver("router", "router", "p")
    pair.deliver("hand-offs", "p", "d")  # the stream stands, the grant is on its way
    pair.handle("d", doors.SenderLost(P, "reset"))
    pool = pair.decode.scheduler.cache.pool
    assert [failed.code.name for failed in pair.failed] == ["PEER_LOST"]
    assert pool.num_quarantined == 5
    assert pool.num_free == pool.num_pages - 5
    pair.handle("d", PeerGone(P))
    assert pool.num_free == pool.num_pages


def test_decode_pages_that_run_out_are_taken_from_the_latest_and_nobody_gets_another_answer() -> None:
    pair = Pair(random.Random(3), decode_pages=16)
    jobs = [job(i, [i + 1] * 7, max_tokens=30) for i in range(4)]
    for each in jobs:
        pair.start(each)
    pair.run(pair.rng)
    assert pair.decode.scheduler.num_preemptions > 0
    for each in jobs:
        assert pair.output(each, 0) == wanted(each, 0)
    pair.assert_nothing_held()


def test_a_shared_prompt_is_neither_computed_nor_sent_twice() -> None:
    pair = Pair(random.Random(0))
    prompt = list(range(32))
    pair.start(job(1, prompt))
    pair.run(pair.rng)
    pair.start(job(2, [*prompt, 1, 2]))
    copied = 0
    perform = pair.perform

    def count(worker: str, commands: list) -> None:
        nonlocal copied
        copied += sum(len(c.src) for c in commands if isinstance(c, doors.StartCopy))
        perform(worker, commands)

    pair.perform = count
    pair.run(pair.rng)
    assert copied == 1
    assert pair.output(job(2, [*prompt, 1, 2]), 0) == wanted(job(2, [*prompt, 1, 2]), 0)


def test_a_router_finds_prompt_and_answer_on_the_decode_worker_for_the_next_turn() -> None:
    pair, link, now_s = Pair(random.Random(0)), LinkId(1), 0.0
    first = job(1, list(range(1, 12)), max_tokens=20)
    pair.start(first)
    pair.run(pair.rng)
    cache = pair.decode.scheduler.cache
    index = PrefixIndex(PrefixHasher(b"k" * 32, "model", block_tokens=PAGE_SIZE))
    index.attach(link, PAGE_SIZE, 64)
    index.apply(KvChanged(link, stored=short_hashes(b"".join(cache.spans))))
    conversation = [*first.token_ids, *pair.output(first, 0)]
    num_computed = len(conversation) - 1  # nobody asked for what follows the last token
    num_held = num_computed // PAGE_SIZE * PAGE_SIZE
    hashes = block_hashes(index.hasher, [*conversation, 5, 6, 7, 8, 9], EVERYONE)
    assert index.match(hashes, now_s) == {link: num_held}
    assert index.reported(link, hashes) == num_held
    second = job(2, [*conversation, 5, 6, 7, 8, 9])
    reused = cache.reuse(Prefix(second.token_ids, EVERYONE), 100)
    assert reused.num_spans * PAGE_SIZE == num_held  # what the router believes is what the worker has
    cache.pool.release(reused.pages.held)
    pair.assert_nothing_held()
