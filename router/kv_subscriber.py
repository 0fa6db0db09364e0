"""Follows a worker's KV events over ZMQ, ours or another's that speaks vLLM's format.

Invariant: the publisher's batches are posted in their order, each once, except that a gap which no replay closes is
posted as the removal of all pages. A replay may begin with a snapshot: it removes all pages, then stores those cached.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import zmq
import zmq.asyncio

from pdserve import kvevents
from pdserve.errors import ProtocolError
from pdserve.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Hash, KvEvent
from pdserve.prefix_hash import PrefixHash, PrefixHasher, short_hashes
from pdserve.router.events import KvChanged, LinkId
from pdserve.zmq_identity import CurveKeys, is_local

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0  # between two batches of a replay
MAX_BLOCKS = 1 << 20  # of one publisher; more are not looked at
_ALL_CLEARED: tuple[KvEvent, ...] = (AllBlocksCleared(),)

Post = Callable[[KvChanged], None]


@dataclass(frozen=True, slots=True)
class Source:
    endpoint: str
    replay_endpoint: str  # empty: nowhere


class PublishedBlocks:
    """Turns one publisher's events into ours: it may hash blocks as it likes, so their tokens are hashed again."""

    def __init__(self, link: LinkId, hasher: PrefixHasher) -> None:
        self._link = link
        self._hasher = hasher
        self._hashes: dict[Hash, PrefixHash] = {}  # ours, by the publisher's

    def change(self, event: KvEvent) -> KvChanged:
        match event:
            case BlockStored():
                return KvChanged(self._link, stored=short_hashes(b"".join(self._store(event))))
            case BlockRemoved(keys):
                removed = [self._hashes.pop(key) for key in keys if key in self._hashes]
                return KvChanged(self._link, removed=short_hashes(b"".join(removed)))
            case AllBlocksCleared():
                self._hashes.clear()
                return KvChanged(self._link, all_removed=True)

    def _store(self, event: BlockStored) -> list[PrefixHash]:
        """Return our hashes of what is stored; none after a block that was never stored, or was removed."""
        parent, size = event.parent_block_hash, event.block_size
        after = self._hasher.root(event.salt()) if parent is None else self._hashes.get(parent)
        step, rest = divmod(size, self._hasher.block_tokens)
        if after is None or rest or not step or len(self._hashes) + len(event.block_hashes) > MAX_BLOCKS:
            return []
        hashes = self._hasher.extend(after, event.token_ids)[step - 1 :: step]
        self._hashes.update(zip(event.block_hashes, hashes, strict=True))
        return hashes


class KvSubscriber:
    """Follows one worker, for as long as `follow` runs."""

    def __init__(self, source: Source, secret: bytes, blocks: PublishedBlocks, post: Post) -> None:
        self._source = source
        self._secret = secret
        self._blocks = blocks
        self._post = post
        self._next = 0  # number of the batch that is due

    async def follow(self) -> None:
        """Post what the worker publishes, from the first batch that it still has; until cancelled.

        Returns where no socket can be had for what the worker says of itself: it works on, unheard.
        """
        with zmq.asyncio.Context() as context:
            try:
                feed = self._connect(context, zmq.SUB, self._source.endpoint)
                feed.subscribe(b"")
                await self._catch_up(context)
                while True:
                    await self._take(context, await feed.recv_multipart())
            except zmq.ZMQError as error:
                logger.warning("%r cannot be followed: %s", self._source, error)
            finally:
                context.destroy(linger=0)

    async def _take(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3:
                raise ProtocolError(f"kv events: {len(frames)} frames")
            batch = kvevents.decode(frames[1], frames[2])
        except ProtocolError as error:
            logger.warning("%s: %s", self._source.endpoint, error)
            self._post_all(_ALL_CLEARED)
            return
        if batch.sequence > self._next:
            await self._catch_up(context)
        self._accept(batch)

    def _accept(self, batch: kvevents.Batch) -> None:
        """Post a batch unless it was posted before; forget everything first where others before it are lost."""
        if batch.sequence < self._next:
            return
        if batch.sequence > self._next and self._next:
            logger.warning("%s: batches %d to %d are lost", self._source.endpoint, self._next, batch.sequence - 1)
            self._post_all(_ALL_CLEARED)
        self._next = batch.sequence + 1
        self._post_all(batch.events)

    def _post_all(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self._post(self._blocks.change(event))

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Take the batches that are due from a replay, as far as there is one."""
        if not self._source.replay_endpoint:
            return
        is_snapshot = False  # its batches are fewer than those that they stand for
        try:
            async for batch in self._replay(context):
                is_snapshot = is_snapshot or (batch.sequence >= self._next and batch.events[:1] == _ALL_CLEARED)
                if is_snapshot:
                    self._next = batch.sequence
                self._accept(batch)
        except TimeoutError:
            logger.warning("%s: no replay: nothing came for %g s", self._source.replay_endpoint, REPLAY_TIMEOUT_S)
        except ProtocolError as error:
            logger.warning("%s: no replay: %s", self._source.replay_endpoint, error)

    async def _replay(self, context: zmq.asyncio.Context) -> AsyncIterator[kvevents.Batch]:
        with self._connect(context, zmq.DEALER, self._source.replay_endpoint) as replay:
            await replay.send_multipart((b"", self._next.to_bytes(kvevents.SEQUENCE_BYTES, "big")))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await replay.recv_multipart()
                if len(frames) < 2:
                    raise ProtocolError(f"kv events: a replay of {len(frames)} frames")
                *_, number, payload = frames
                if number == kvevents.END_OF_REPLAY:
                    return
                yield kvevents.decode(number, payload)

    def _connect(self, context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.linger = 0
        if not is_local(endpoint):
            CurveKeys.of(self._secret).show(socket)
        socket.connect(endpoint)
        return socket
