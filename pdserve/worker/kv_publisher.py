"""Publishes what changes in a worker's prefix cache over ZMQ, in vLLM's format, with a socket that replays the last
batches to subscribers who missed some.

A subscriber that missed more batches than are kept gets a snapshot in place of a replay: AllBlocksCleared, then all
that is cached and can be reused. The snapshot's batches take the numbers of the missed ones; its last batch takes the
number last published.

On this machine anybody may subscribe. Beyond it, subscribers prove by CURVE that they know the cluster's secret.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, closing

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from pdserve import kvevents
from pdserve.config import WorkerConfig
from pdserve.engine.kvcache import CacheChange, PagesStored
from pdserve.errors import ConfigError
from pdserve.kvevents import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Hash, KvEvent
from pdserve.prefix_hash import PrefixHash, short_hashes
from pdserve.proto.v1 import link_pb2 as link
from pdserve.token_ids import TOKEN_ID_BYTES, from_wire, to_wire
from pdserve.zmq_identity import AnySocket, CurveKeys, is_local

logger = logging.getLogger(__name__)

MAX_UNSENT = 100_000  # batches that wait for one slow subscriber; beyond it that one misses some
YIELD_AFTER = 8  # batches of a replay, before others have their turn
SNAPSHOT_TOKENS = 4096  # in a batch of a snapshot: they take about 0.5 ms to encode


class _Page(msgspec.Struct, gc=False):  # made by the million: the garbage collector need not look at them
    parent: PrefixHash | None  # None: it begins a sequence
    packed: bytes  # its tokens
    salt: str


class KvPublisher:
    """One worker's publisher. Close it when the worker ends."""

    def __init__(self, config: WorkerConfig, endpoint: str, secret: bytes) -> None:
        """Bind; ConfigError where that cannot be."""
        replay_endpoint, num_kept = config.kv_events_replay_endpoint, config.kv_events_buffer_steps
        self._page_size = config.page_size
        self._pages: dict[PrefixHash, _Page] = {}  # that are cached, if they may be asked for
        self._topic = config.kv_events_topic.encode()
        self._last = -1
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept)
        self._context = zmq.asyncio.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        endpoints = [endpoint, *([replay_endpoint] if replay_endpoint else [])]
        keys = None if all(map(is_local, endpoints)) else self._require_keys(secret)
        self._pub = zmq.Context(self._context).socket(zmq.PUB)  # sends without waiting: not asyncio's
        self._sockets: list[AnySocket] = [self._pub]
        try:
            self._pub.sndhwm = MAX_UNSENT
            self.endpoint = _bind(self._pub, endpoint, keys, "kv_events_endpoint")
            self._replay: zmq.asyncio.Socket | None = None
            self.replay_endpoint = ""
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.sndhwm = max(MAX_UNSENT, num_kept + 1)  # it drops what is beyond
                self._sockets.append(self._replay)
                self.replay_endpoint = _bind(self._replay, replay_endpoint, keys, "kv_events_replay_endpoint")
        except BaseException:
            self.close()
            raise
        logger.info("publishing KV events on %s", self.endpoint)

    def _require_keys(self, secret: bytes) -> CurveKeys:
        keys = CurveKeys.of(secret)
        self._authenticator = keys.authenticator(self._context)
        return keys

    def publish_changes(self, changes: Sequence[CacheChange]) -> None:
        self.publish(kvevents.encode([self._event(change) for change in changes], time.time()))

    def publish(self, batch: bytes) -> None:
        """Send a batch to all subscribers. Never blocks: who is too slow finds a gap, and may ask for a replay."""
        self._last += 1
        number = self._last.to_bytes(kvevents.SEQUENCE_BYTES, "big")
        self._sent.append((number, batch))
        self._pub.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    def _event(self, change: CacheChange) -> KvEvent:
        if not isinstance(change, PagesStored):
            for page in change.hashes:
                self._pages.pop(page, None)
            return BlockRemoved(_numbers(change.hashes), MEDIUM)
        prefix, run, size = change.prefix, change.run, self._page_size
        token_ids = list(prefix.token_ids[run.start * size : run.stop * size])
        parent = prefix.hashes[run.start - 1] if run.start else None
        if self._replay is not None:
            before, packed = parent, to_wire(token_ids)
            for number, page in enumerate(change.hashes):
                here = number * size * TOKEN_ID_BYTES
                self._pages[page] = _Page(before, packed[here : here + size * TOKEN_ID_BYTES], prefix.salt)
                before = page
        return _stored(change.hashes, parent, token_ids, size, prefix.salt)

    async def serve_replays(self) -> None:
        """Answer who missed batches, until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != kvevents.SEQUENCE_BYTES:
                logger.warning("a replay was asked for in %d frames that mean nothing", len(frames))
                continue
            await self._answer(self._replay, *frames)

    async def _answer(self, replay: zmq.asyncio.Socket, client: bytes, empty: bytes, first: bytes) -> None:
        with closing(self._missed(first)) as batches:
            for count, (number, payload) in enumerate(batches, start=1):
                await replay.send_multipart((client, empty, self._topic, number, payload))
                if count % YIELD_AFTER == 0:
                    await asyncio.sleep(0)  # sending waits for nobody
        await replay.send_multipart((client, empty, b"", kvevents.END_OF_REPLAY, b""))

    def _missed(self, first: bytes) -> Generator[tuple[bytes, bytes]]:
        """Return the batches from this one on, numbers and payloads; a snapshot if they are no longer all there."""
        if self._sent and first < self._sent[0][0]:
            yield from self._snapshot(int.from_bytes(first, "big"))
        else:
            yield from [(number, payload) for number, payload in self._sent if number >= first]

    def _snapshot(self, first: int) -> Generator[tuple[bytes, bytes]]:
        """Return what is cached in place of the batches from the first one on, up to the last one published by now."""
        last, pages, count = self._last, self._reusable(), max(1, SNAPSHOT_TOKENS // self._page_size)
        for number, start in enumerate(range(0, max(1, len(pages)), count), start=first):
            events: list[KvEvent] = [] if start else [AllBlocksCleared()]
            events += _runs(pages[start : start + count], self._page_size)
            number_ = last if start + count >= len(pages) else min(number, last)
            yield number_.to_bytes(kvevents.SEQUENCE_BYTES, "big"), kvevents.encode(events, time.time())

    def _reusable(self) -> list[tuple[PrefixHash, _Page]]:
        """Return the pages that are cached with all pages before them, each after the page before it."""
        following: defaultdict[PrefixHash | None, list[tuple[PrefixHash, _Page]]] = defaultdict(list)
        for hash_, page in self._pages.items():
            following[page.parent].append((hash_, page))
        pages, open_ends = [], following[None]
        while open_ends:
            pages.append(open_ends.pop())
            open_ends += following.get(pages[-1][0], ())
        return pages

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


def _runs(pages: Sequence[tuple[PrefixHash, _Page]], page_size: int) -> Iterator[BlockStored]:
    """Yield events that tell of pages: one for each run in which a page follows the one before it."""
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end][1].parent != pages[end - 1][0]:
            first, packed = pages[start][1], b"".join([page.packed for _, page in pages[start:end]])
            token_ids = from_wire(packed, "page").tolist()
            yield _stored([hash_ for hash_, _ in pages[start:end]], first.parent, token_ids, page_size, first.salt)
            start = end


def _stored(
    hashes: Sequence[PrefixHash], parent: PrefixHash | None, token_ids: list[int], page_size: int, salt: str
) -> BlockStored:
    return BlockStored(
        _numbers(hashes),
        None if parent is None else _numbers((parent,))[0],
        token_ids,
        page_size,
        medium=MEDIUM,
        extra_keys=[(salt,), *[None] * (len(hashes) - 1)] if salt and parent is None else None,
    )


def _numbers(hashes: Sequence[PrefixHash]) -> list[Hash]:
    """Return hashes as subscribers know them: numbers of 64 bits."""
    return list(short_hashes(b"".join(hashes)))


@asynccontextmanager
async def publishing(config: WorkerConfig, secret: bytes, register: link.Register) -> AsyncIterator[KvPublisher | None]:
    """Publish KV events for the length of the block, if the configuration says where, and register where.

    What breaks the replays breaks the block.
    """
    if config.kv_events_endpoint is None:
        yield None
        return
    publisher = KvPublisher(config, config.kv_events_endpoint, secret)
    register.kv_events_endpoint = publisher.endpoint
    register.kv_events_replay_endpoint = publisher.replay_endpoint
    try:
        async with asyncio.TaskGroup() as tasks:
            replaying = tasks.create_task(publisher.serve_replays(), name="kv event replays")
            yield publisher
            replaying.cancel()
    finally:
        publisher.close()


def _bind(socket: AnySocket, endpoint: str, keys: CurveKeys | None, key: str) -> str:
    """Bind and return where; the name of a free port's stands in what is returned."""
    if keys is not None:
        keys.guard(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: cannot listen on {endpoint}: {error}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
