"""Routers know what a worker's cache holds, whenever they attach and however slowly they read."""

from collections.abc import Iterator
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import BLOCK_TOKENS, HASH_BYTES, CacheScope, PrefixHash, PrefixHasher
from pdserve.router import wire
from pdserve.router.placement.prefix_index import PrefixIndex, block_hashes
from pdserve.router.requests.events import KvChanged, LinkId
from pdserve.worker.kv_feed import MAX_PAGES, KvFeed
from pdserve.worker.link import Deferred, Links
from pdserve.worker.messages import RouterRef

PAGE_SIZE = 2


class FakeLinks:
    """Links to routers that read when they are asked to."""

    def __init__(self) -> None:
        self.waiting: dict[RouterRef, list[Deferred]] = {}

    @property
    def wanting_kv_events(self) -> tuple[RouterRef, ...]:
        return tuple(self.waiting)

    def send(self, router: RouterRef, message: Deferred) -> None:
        self.waiting[router].append(message)

    def read(self, router: RouterRef) -> link.AttachRequest | None:
        return self.waiting[router].pop(0)()


class Worker:
    """A real prefix cache, what is reported of it, and what routers make of that."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE, max_pages: int = MAX_PAGES) -> None:
        self.hasher = PrefixHasher(b"secret", "model", min(page_size, BLOCK_TOKENS))
        self.kv = KvCache(num_pages, Paging.of(page_size), self.hasher)
        self.links = FakeLinks()
        self.feed = KvFeed(self.kv, cast(Links, self.links), max_pages=max_pages)
        self.known: dict[RouterRef, set[PrefixHash]] = {}

    def attach(self) -> RouterRef:
        router = RouterRef(len(self.known))
        self.links.waiting[router], self.known[router] = [], set()
        return router

    def detach(self, router: RouterRef) -> None:
        del self.links.waiting[router]

    def serve(self, token_ids: list[int], salt: str = "") -> int:
        """Compute a prompt and end; return how many tokens were reused."""
        reused = self.kv.reuse(Prefix(token_ids, CacheScope(salt)), (len(token_ids) - 1) // self.kv.page_size)
        self.kv.pool.release(reused.pages.held)
        for _ in self.compute(token_ids, salt):
            pass
        return reused.num_spans * self.kv.page_size

    def compute(self, token_ids: list[int], salt: str) -> Iterator[None]:
        """Compute a prompt, page by page."""
        prefix, num_full = Prefix(token_ids, CacheScope(salt)), len(token_ids) // self.kv.page_size
        hit = self.kv.reuse(prefix, num_full)
        fresh = self.kv.take(self.kv.paging.num_pages(len(token_ids)) - hit.num_spans)
        if fresh is None:
            self.kv.pool.release(hit.pages.held)
            return
        hit.pages.runs[0].extend(fresh)
        for number in range(hit.num_spans, num_full):
            self.kv.publish(prefix, hit.pages, range(number, number + 1))
            yield
        self.kv.pool.release(hit.pages.held)

    def read(self, router: RouterRef) -> link.KvEvents | None:
        """Let a router read a message: it tells what the router did not know."""
        message = self.links.read(router)
        if message is None:
            return None
        known, stored = self.known[router], set(split(message.kv_events.stored))
        removed = set(split(message.kv_events.removed))
        assert not stored & known  # nothing twice
        self.known[router] = (known | stored) - removed
        return message.kv_events

    def act(self, move: str) -> None:
        if move == "attach":
            self.attach()
        elif move == "detach" and self.links.waiting:
            self.detach(next(iter(self.links.waiting)))
        elif move == "read":
            for router in [router for router, messages in self.links.waiting.items() if messages]:
                self.read(router)
        elif move == "flush":
            self.feed.flush()

    def read_all(self, router: RouterRef) -> None:
        while self.links.waiting[router]:
            self.read(router)


def split(packed: bytes) -> list[PrefixHash]:
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


prompts = st.tuples(st.lists(st.integers(0, 1), max_size=8), st.sampled_from(["", "tenant"]))
moves = st.lists(st.one_of(prompts, st.sampled_from(["attach", "detach", "read", "flush", "step"])), max_size=40)


@given(moves, st.integers(1, 3))
def test_whoever_attaches_at_any_time_ends_up_knowing_what_is_cached(moves: list[object], max_pages: int) -> None:
    worker, running = Worker(6, max_pages=max_pages), list[Iterator[None]]()
    for move in moves:
        if isinstance(move, tuple):
            running.append(worker.compute(*move))
            next(running[-1], None)
        elif move == "step":
            running = [each for each in running if next(each, "over") != "over"]
        else:
            worker.act(str(move))
    worker.feed.flush()
    for router in worker.links.waiting:
        worker.read_all(router)
        assert worker.known[router] == worker.kv.spans.keys()


def test_a_snapshot_is_one_message() -> None:
    worker = Worker(1000)
    worker.serve(list(range(1000 * PAGE_SIZE)))
    router = worker.attach()
    worker.feed.flush()
    message = worker.read(router)
    assert message is not None
    assert len(split(message.stored)) == 1000
    assert not worker.links.waiting[router]


def test_a_message_is_bounded_and_the_next_waits_its_turn() -> None:
    worker = Worker(1000, max_pages=300)
    worker.serve(list(range(1000 * PAGE_SIZE)))
    router = worker.attach()
    worker.feed.flush()
    sizes = []
    while worker.links.waiting[router]:
        assert len(worker.links.waiting[router]) == 1
        message = worker.read(router)
        assert message is not None
        sizes.append(len(split(message.stored)))
    assert sizes == [300, 300, 300, 100]


def test_a_router_that_reads_nothing_costs_no_more_than_the_pages_there_are() -> None:
    worker = Worker(100)
    router = worker.attach()
    for number in range(1000):
        worker.serve([number] * 10)
        worker.feed.flush()
    assert len(worker.links.waiting[router]) == 1
    assert len(worker.feed._unsent[router]) <= 100
    worker.read_all(router)
    assert worker.known[router] == worker.kv.spans.keys()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.sampled_from(["", "tenant"])), max_size=9
    ),
    st.sampled_from([16, 48, 64]),
)
def test_what_a_router_predicts_is_what_the_worker_reuses(asked: list[tuple[list[int], str]], size: int) -> None:
    worker, link_id = Worker(12, size), LinkId(1)
    index, router = PrefixIndex(worker.hasher), worker.attach()
    index.attach(link_id, size, 12)
    for repeated, salt in asked:
        token_ids = [2, *(token for token in repeated for _ in range(24))]
        worker.feed.flush()
        while worker.links.waiting[router]:
            message = worker.links.read(router)
            for event in wire.worker_events(link_id, message) if message else ():
                assert isinstance(event, KvChanged)
                index.apply(event)
        hashes = block_hashes(worker.hasher, token_ids, CacheScope(salt))[: (len(token_ids) - 1) // BLOCK_TOKENS]
        assert index.match(hashes, 0.0).get(link_id, 0) == worker.serve(token_ids, salt)


def test_each_tier_is_reported_by_a_feed_of_its_own() -> None:
    worker = Worker(8)
    host = KvFeed(worker.kv, cast(Links, worker.links), tier=Tier.HOST)
    router = worker.attach()
    worker.serve([1, 2, 3, 4])
    reported = {}
    for feed in (worker.feed, host):
        feed.flush()
        message = worker.links.read(router)
        assert message is not None
        reported[message.kv_events.tier] = len(split(message.kv_events.stored))
    assert reported == {link.TIER_DEVICE: 2, link.TIER_HOST: 2}
