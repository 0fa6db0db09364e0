"""KV events over real sockets: published and replayed in vLLM's format, on this machine alone."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.base.errors import ConfigError
from pdserve.engine.kvcache import KvCache, PagesRemoved, PagesStored, Prefix
from pdserve.net.credentials import Credentials
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import BLOCK_TOKENS, EVERYONE, CacheScope, PrefixHash, PrefixHasher, short_hashes
from pdserve.settings.config import WorkerConfig
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.kv_publisher import END_OF_REPLAY, KvPublisher, publishing
from pdserve.worker.link import Links

HASHER = PrefixHasher(b"a secret of the cluster", "model")
TENANTS = CacheScope("tenant")
GOLD = link.Adapter(name="gold", digest=b"gold" * 8)
LOCAL = "tcp://127.0.0.1:*"


def config_of(endpoint: str, replay: str | None, buffer_steps: int = 100) -> WorkerConfig:
    return WorkerConfig(
        role="prefill",
        model="m",
        worker_id="p0",
        routers=("127.0.0.1:1",),
        secret_file=Path("secret"),
        page_size=BLOCK_TOKENS,
        kv_events_endpoint=endpoint,
        kv_events_replay_endpoint=replay,
        kv_events_topic="kv",
        kv_events_buffer_steps=buffer_steps,
    )


@asynccontextmanager
async def publisher(buffer_steps: int = 100) -> AsyncIterator[KvPublisher]:
    """Publish, and answer replays, for the length of the block."""
    async with publishing(config_of(LOCAL, LOCAL, buffer_steps), link.Register(adapters=[GOLD])) as ours:
        assert ours is not None
        yield ours


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context:
        try:
            socket = context.socket(kind)
            socket.connect(endpoint)
            yield socket
        finally:
            context.destroy(linger=0)


def page(number: int) -> PrefixHash:
    return number.to_bytes(16, "little")


def publish(ours: KvPublisher, number: int) -> None:
    ours.publish([PagesRemoved([page(number)])])


async def replayed(ours: KvPublisher, first: int) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return number and events of each batch that a replay from `first` on has."""
    batches = []
    with connected(zmq.DEALER, ours.replay_endpoint) as client:
        await client.send_multipart((b"", first.to_bytes(8, "big")))
        async with asyncio.timeout(30):
            while (frames := await client.recv_multipart())[2] != END_OF_REPLAY:
                empty, topic, number, batch = frames
                assert (empty, topic) == (b"", b"kv")
                batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1]))
    assert frames[1:] == [b"", END_OF_REPLAY, b""]
    return batches


class Publishing:
    """A prefix cache whose changes are published as a worker does."""

    def __init__(self, ours: KvPublisher, num_pages: int, scope: CacheScope = TENANTS) -> None:
        self._scope = scope
        self.cache = KvCache(num_pages, Paging.of(BLOCK_TOKENS), HASHER)
        self._feed = KvFeed(self.cache, Links((), Credentials(b""), link.Register(), _nobody, print), ours)

    def serve(self, token_ids: list[int]) -> None:
        prefix = Prefix(token_ids, self._scope)
        hit = self.cache.reuse(prefix, len(token_ids) // BLOCK_TOKENS)
        hit.pages.runs[0].extend(self.cache.take(self.cache.paging.num_pages(len(token_ids)) - hit.num_spans) or ())
        self.cache.publish(prefix, hit.pages, range(hit.num_spans, len(hit.pages.held)))
        self.cache.pool.release(hit.pages.held)
        self._feed.flush()


async def _nobody(_: object) -> None:
    raise AssertionError("no router is attached")


async def test_pages_are_published_with_their_tokens_and_removed_by_the_same_hashes() -> None:
    async with publisher() as ours:
        worker, tokens = Publishing(ours, num_pages=4), list(range(4 * BLOCK_TOKENS))
        hashes = short_hashes(b"".join(HASHER.extend(HASHER.root(TENANTS), tokens)))
        worker.serve(tokens[: 2 * BLOCK_TOKENS])
        worker.serve(tokens)
        worker.serve([7] * BLOCK_TOKENS)
        (_, [first]), (_, [rest]), (_, [removed, *_]) = await replayed(ours, 0)
    vllms = {"type": "BlockStored", "block_size": BLOCK_TOKENS, "medium": "GPU", "lora_id": None, "lora_name": None}
    assert first == vllms | {
        "block_hashes": hashes[:2],
        "parent_block_hash": None,
        "token_ids": tokens[: 2 * BLOCK_TOKENS],
        "extra_keys": [["tenant"], None],
    }
    assert rest == vllms | {
        "block_hashes": hashes[2:],
        "parent_block_hash": hashes[1],
        "token_ids": tokens[2 * BLOCK_TOKENS :],
    }
    assert removed["type"] == "BlockRemoved"
    assert set(removed["block_hashes"]) < set(hashes)


@pytest.mark.parametrize(
    ("scope", "name", "first", "later"),
    [
        (CacheScope("tenant", GOLD.digest), "gold", ["gold", "tenant"], ["gold"]),
        (CacheScope("", GOLD.digest), "gold", ["gold"], ["gold"]),
        (CacheScope("", b"gone" * 8), (b"gone" * 8).hex(), [(b"gone" * 8).hex()], [(b"gone" * 8).hex()]),
    ],
)
async def test_pages_of_an_adapter_are_published_with_its_name(
    scope: CacheScope, name: str, first: list[str], later: list[str]
) -> None:
    async with publisher() as ours:
        worker = Publishing(ours, num_pages=4, scope=scope)
        worker.serve(list(range(2 * BLOCK_TOKENS)))
        worker.serve(list(range(3 * BLOCK_TOKENS)))
        stored = [event for _, (event,) in await replayed(ours, 0)]
    assert [event["lora_name"] for event in stored] == [name, name]
    assert [event["extra_keys"] for event in stored] == [[first, later], [later]]


async def test_a_subscriber_gets_topic_number_and_batch() -> None:
    async with publisher() as ours:
        with connected(zmq.SUB, ours.endpoint) as subscriber:
            subscriber.subscribe(b"")
            number = 0
            async with asyncio.timeout(10):  # what is published before the subscription has arrived is lost
                while not await subscriber.poll(50):
                    publish(ours, number)
                    number += 1
                topic, sequence, batch = await subscriber.recv_multipart()
    assert topic == b"kv"
    assert msgspec.msgpack.decode(batch)[1][0]["block_hashes"] == [int.from_bytes(sequence, "big")]


async def test_a_replay_has_the_batches_from_the_first_that_is_missed_on_as_far_as_they_are_kept() -> None:
    async with publisher(buffer_steps=5) as ours:
        for number in range(8):
            publish(ours, number)
        assert [number for number, _ in await replayed(ours, 6)] == [6, 7]
        assert [number for number, _ in await replayed(ours, 0)] == [3, 4, 5, 6, 7]
        assert await replayed(ours, 8) == []


async def test_a_replay_is_complete_however_long_it_is() -> None:
    num_batches = 6000  # ZMQ by itself drops what is beyond a thousand
    async with publisher(buffer_steps=num_batches) as ours:
        for number in range(num_batches):
            publish(ours, number)
        assert [number for number, _ in await replayed(ours, 0)] == list(range(num_batches))


async def test_a_replay_that_means_nothing_is_not_answered_and_others_are() -> None:
    async with publisher() as ours:
        publish(ours, 0)
        with connected(zmq.DEALER, ours.replay_endpoint) as client:
            await client.send_multipart((b"", b"short"))
            await client.send_multipart((b"what",))
        assert len(await replayed(ours, 0)) == 1


async def test_what_breaks_the_replays_breaks_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(KvPublisher, "_answer", broken)

    async def publish_for_ever() -> None:
        async with asyncio.timeout(10), publisher() as ours:
            with connected(zmq.REQ, ours.replay_endpoint) as client:
                await client.send(bytes(8))
                await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await publish_for_ever()
    assert [type(error) for error in caught.value.exceptions] == [LookupError]


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://somewhere:5557"])
def test_endpoints_that_other_machines_may_reach_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_events_endpoint: .* may be reached from other machines"):
        KvPublisher(config_of(endpoint, None), endpoint)
    with pytest.raises(ConfigError, match=r"kv_events_replay_endpoint: .* may be reached from other machines"):
        KvPublisher(config_of(LOCAL, endpoint), LOCAL)


def test_what_is_no_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_events_endpoint: nonsense is no endpoint"):
        KvPublisher(config_of("nonsense", None), "nonsense")


def test_an_endpoint_that_cannot_be_bound_is_the_operators_to_mend() -> None:
    with pytest.raises(ConfigError, match="kv_events_endpoint: cannot listen on ipc:///no/such/folder"):
        KvPublisher(config_of("ipc:///no/such/folder/events", None), "ipc:///no/such/folder/events")


@pytest.mark.parametrize(("tier", "medium"), [(Tier.DEVICE, "GPU"), (Tier.HOST, "CPU"), (Tier.DISK, "STORAGE")])
async def test_subscribers_learn_by_vllms_names_on_which_tier_pages_are(tier: Tier, medium: str) -> None:
    prefix = Prefix(list(range(BLOCK_TOKENS)), EVERYONE, [page(7)])
    async with publisher() as ours:
        ours.publish([PagesStored(prefix, range(1), tier=tier), PagesRemoved([page(7)], tier=tier)])
        ((_, events),) = await replayed(ours, 0)
    assert [(event["type"], event["medium"]) for event in events] == [("BlockStored", medium), ("BlockRemoved", medium)]
