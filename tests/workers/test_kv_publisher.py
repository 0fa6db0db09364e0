"""KV events over real sockets: published, replayed, followed by the router, refused to strangers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pdserve import kvevents
from pdserve.config import WorkerConfig
from pdserve.credentials import Credentials
from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.errors import ConfigError
from pdserve.kvevents import BlockStored
from pdserve.prefix_hash import BLOCK_TOKENS, PrefixHasher
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router import kv_subscriber
from pdserve.router.events import KvChanged, LinkId
from pdserve.router.kv_subscriber import KvSubscriber, PublishedBlocks, Source
from pdserve.router.prefix_index import PrefixIndex, block_hashes
from pdserve.worker import kv_publisher
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.kv_publisher import KvPublisher, publishing
from pdserve.worker.link import Links
from pdserve.zmq_identity import CurveKeys, is_local

SECRET = b"a secret of the cluster, long enough"
HASHER, LINK = PrefixHasher(SECRET, "model"), LinkId(1)
CLEARED = KvChanged(LINK, all_removed=True)
LOCAL = "tcp://127.0.0.1:*"
EVERYWHERE = "tcp://0.0.0.0:*"


def batch(number: int) -> bytes:
    return kvevents.encode([BlockStored([number], None, [number] * BLOCK_TOKENS, BLOCK_TOKENS)], 0.0)


def stored(number: int) -> KvChanged:
    """Return what a router makes of a batch."""
    return KvChanged(LINK, stored=list(block_hashes(HASHER, [number] * BLOCK_TOKENS, "")))


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
async def publisher(
    endpoint: str = LOCAL, replay: str | None = LOCAL, buffer_steps: int = 100
) -> AsyncIterator[KvPublisher]:
    """Publish, and answer replays, for the length of the block."""
    publisher = KvPublisher(config_of(endpoint, replay, buffer_steps), endpoint, SECRET)
    replaying = asyncio.create_task(publisher.serve_replays())
    try:
        yield publisher
    finally:
        replaying.cancel()
        await asyncio.wait([replaying])
        publisher.close()


def subscriber(source: Source, secret: bytes, post: Callable[[KvChanged], object]) -> KvSubscriber:
    return KvSubscriber(source, secret, PublishedBlocks(LINK, HASHER), post)


class Follower:
    """A router's subscriber, and what it posted."""

    def __init__(self, source: Source, secret: bytes = SECRET) -> None:
        self.heard: asyncio.Queue[KvChanged] = asyncio.Queue()
        self._task = asyncio.create_task(subscriber(source, secret, self.heard.put_nowait).follow())

    async def next(self) -> KvChanged:
        async with asyncio.timeout(10):
            return await self.heard.get()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def following(source: Source, secret: bytes = SECRET) -> AsyncIterator[Follower]:
    follower = Follower(source, secret)
    try:
        yield follower
    finally:
        await follower.stop()


def source_of(publisher: KvPublisher) -> Source:
    return Source(
        publisher.endpoint.replace("0.0.0.0", "127.0.0.1"), publisher.replay_endpoint.replace("0.0.0.0", "127.0.0.1")
    )


async def test_who_comes_late_hears_all_batches_if_the_publisher_still_has_them_and_then_what_follows() -> None:
    async with publisher(buffer_steps=5) as ours:
        for number in range(5):
            ours.publish(batch(number))
        async with following(source_of(ours)) as follower:
            assert [await follower.next() for _ in range(5)] == [stored(number) for number in range(5)]
            ours.publish(batch(5))
            assert await follower.next() == stored(5)


async def test_a_replay_is_complete_however_long_it_is() -> None:
    num_batches = 6000  # ZMQ by itself drops what is beyond a thousand
    async with publisher(buffer_steps=num_batches) as ours:
        for number in range(num_batches):
            ours.publish(batch(number))
        async with following(source_of(ours)) as follower:
            assert [await follower.next() for _ in range(num_batches)] == [stored(n) for n in range(num_batches)]


class Publishing:
    """A prefix cache whose changes are published as a worker does."""

    def __init__(self, ours: KvPublisher) -> None:
        self.cache = KvCache(1000, BLOCK_TOKENS, HASHER)
        self._feed = KvFeed(self.cache, Links((), Credentials(SECRET), link.Register(), _nobody, print), ours)

    def serve(self, token_ids: list[int]) -> None:
        pages = self.cache.take(self.cache.num_pages(len(token_ids))) or ()
        self.cache.publish(Prefix(token_ids, "tenant"), pages, range(len(pages)))
        self.cache.pool.release(pages)
        self._feed.flush()


async def _nobody(_: object) -> None:
    raise AssertionError("no router is attached")


def prompt(number: int) -> list[int]:
    return [number] * 64


def new_index() -> PrefixIndex:
    index = PrefixIndex(HASHER)
    index.attach(LINK, BLOCK_TOKENS, 1 << 16)
    return index


def num_known(index: PrefixIndex, token_ids: list[int]) -> int:
    return index.match(block_hashes(HASHER, token_ids, "tenant"), 0.0).get(LINK, 0)


async def test_who_comes_later_than_replays_reach_gets_a_snapshot_and_then_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_publisher, "SNAPSHOT_TOKENS", 64)
    async with publisher(buffer_steps=2) as ours:
        worker, index = Publishing(ours), new_index()
        for number in range(50):
            worker.serve(prompt(number))
        async with following(source_of(ours)) as follower:
            while not all(num_known(index, prompt(number)) for number in range(50)):
                index.apply(await follower.next())
            worker.serve(prompt(50))
            index = new_index()
            index.apply(await follower.next())  # it has lost nothing meanwhile, so this is the next batch
            assert num_known(index, prompt(50)) == 64


def known_from_snapshot(ours: KvPublisher, token_ids: list[int]) -> int:
    """Return how much of a prompt is known to who starts with a snapshot."""
    index, blocks = new_index(), PublishedBlocks(LINK, HASHER)
    for _, payload in ours._missed(bytes(8)):
        for event in kvevents.decode(bytes(8), payload).events:
            index.apply(blocks.change(event))
    return num_known(index, token_ids)


async def test_a_page_that_outlives_the_one_before_it_is_in_a_snapshot_once_that_is_stored_again() -> None:
    async with publisher(buffer_steps=1) as ours:
        worker, token_ids = Publishing(ours), list(range(2 * BLOCK_TOKENS))
        pool = worker.cache.pool
        worker.serve(token_ids)
        held = worker.cache.reuse(Prefix(token_ids, "tenant"), 2)
        assert known_from_snapshot(ours, token_ids) == 32
        pool.release(held[:1])
        pool.release(worker.cache.take(pool.num_free) or ())  # the first page is forgotten
        worker.serve(prompt(1))
        assert known_from_snapshot(ours, token_ids) == 0
        assert known_from_snapshot(ours, prompt(1)) == 64
        worker.serve(token_ids)
        assert known_from_snapshot(ours, token_ids) == 32


async def test_a_replay_that_does_not_answer_is_named_with_how_long_it_was_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_subscriber, "REPLAY_TIMEOUT_S", 0.05)
    with zmq.asyncio.Context() as context:
        feed, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (feed, replay)]
        async with following(Source(*(f"tcp://127.0.0.1:{port}" for port in ports))) as follower:
            assert await feed.recv() == b"\x01"
            await replay.recv_multipart()
            await feed.send_multipart((b"", bytes(8), batch(0)))
            assert await follower.next() == stored(0)
        context.destroy(linger=0)
    assert "no replay: nothing came for 0.05 s" in caplog.text


async def test_a_replay_is_answered_as_vllm_does() -> None:
    async with publisher() as ours:
        for number in range(3):
            ours.publish(batch(number))
        with zmq.asyncio.Context() as context:
            client = context.socket(zmq.REQ)
            client.connect(ours.replay_endpoint)
            await client.send((1).to_bytes(8, "big"))
            first = await client.recv_multipart()
            assert first == [b"kv", (1).to_bytes(8, "big"), batch(1)]
            context.destroy(linger=0)


async def test_a_replay_that_means_nothing_is_not_answered_and_others_are() -> None:
    async with publisher() as ours:
        ours.publish(batch(0))
        with zmq.asyncio.Context() as context:
            client = context.socket(zmq.DEALER)
            client.connect(ours.replay_endpoint)
            await client.send_multipart((b"", b"short"))
            await client.send_multipart((b"what",))
            await client.send_multipart((b"", bytes(8)))
            async with asyncio.timeout(10):
                assert (await client.recv_multipart())[3] == batch(0)
                assert (await client.recv_multipart())[2:] == [kvevents.END_OF_REPLAY, b""]
            context.destroy(linger=0)


async def test_what_breaks_the_replays_breaks_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(KvPublisher, "_answer", broken)
    config = config_of(LOCAL, LOCAL)

    async def publish_for_ever() -> None:
        with zmq.asyncio.Context() as context:
            client = context.socket(zmq.REQ)
            try:
                async with asyncio.timeout(10), publishing(config, SECRET, link.Register()) as ours:
                    assert ours is not None
                    client.connect(ours.replay_endpoint)
                    await client.send(bytes(8))
                    await asyncio.Event().wait()
            finally:
                context.destroy(linger=0)

    with pytest.raises(ExceptionGroup) as caught:
        await publish_for_ever()
    assert [type(error) for error in caught.value.exceptions] == [LookupError]


async def feed(frames: list[tuple[bytes, bytes]]) -> list[KvChanged]:
    """Return what a subscriber makes of these numbers and payloads, from a publisher without replays."""
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.XPUB)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        async with following(Source(f"tcp://127.0.0.1:{port}", "")) as follower:
            assert await socket.recv() == b"\x01"  # it has subscribed
            for number, payload in frames:
                await socket.send_multipart((b"", number, payload))
            await socket.send_multipart((b"", b"end", b""))
            heard = []
            while (change := await follower.next()) != CLEARED or len(heard) < len(frames):
                heard.append(change)
        context.destroy(linger=0)
    return heard


async def test_a_gap_without_a_replay_forgets_everything_once() -> None:
    frames = [(number.to_bytes(8, "big"), batch(number)) for number in (0, 1, 4, 5)]
    assert await feed(frames) == [stored(0), stored(1), CLEARED, stored(4), stored(5)]


@pytest.mark.parametrize("source", [Source("nonsense", ""), Source("tcp://127.0.0.1:1", "nonsense")])
async def test_a_worker_that_names_no_endpoint_is_not_followed_and_nothing_breaks(source: Source) -> None:
    async with asyncio.timeout(10):
        await subscriber(source, SECRET, print).follow()


async def test_a_replay_that_makes_no_sense_is_done_without() -> None:
    with zmq.asyncio.Context() as context:
        feed, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (feed, replay)]
        async with following(Source(*(f"tcp://127.0.0.1:{port}" for port in ports))) as follower:
            assert await feed.recv() == b"\x01"
            client, *_ = await replay.recv_multipart()
            await replay.send_multipart((client, b"alone"))
            await feed.send_multipart((b"", bytes(8), batch(0)))
            assert await follower.next() == stored(0)
        context.destroy(linger=0)


async def handshake(port: str, secret: bytes) -> int:
    """Return what comes of connecting to a publisher with the keys of a cluster with this secret."""
    with zmq.asyncio.Context() as context:
        socket, seen = context.socket(zmq.SUB), zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        CurveKeys.of(secret).show(socket)
        monitor = socket.get_monitor_socket(seen | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(f"tcp://127.0.0.1:{port}")
            async with asyncio.timeout(10):
                message = await monitor.recv_multipart()
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
    return int.from_bytes(message[0][:2], "little")


async def test_beyond_this_machine_only_who_knows_the_secret_hears_anything() -> None:
    async with publisher(EVERYWHERE, EVERYWHERE) as ours:
        port = ours.endpoint.rpartition(":")[2]
        assert await handshake(port, SECRET) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert await handshake(port, b"another secret, just as long as that") != zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///run/kv-events", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://somewhere:5557", False),
        ("nonsense", False),
    ],
)
def test_endpoints_that_others_can_reach_are_known(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local


async def test_an_endpoint_that_cannot_be_bound_is_the_operators_to_mend() -> None:
    nowhere = "tcp://nowhere.invalid:1"
    with pytest.raises(ConfigError, match="kv_events_endpoint: cannot listen on tcp://nowhere"):
        KvPublisher(config_of(nowhere, None), nowhere, SECRET)
