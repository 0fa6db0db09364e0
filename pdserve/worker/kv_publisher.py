"""Publishes what changes in a worker's prefix cache over ZMQ in vLLM's format, so that others' routers can follow.

A message has three parts: topic, sequence number (8 bytes, big end first), and a msgpack batch. The batch is an array
of time and events; an event is a map whose "type" names it. Subscribers that missed messages ask another socket for
those that are still kept.

Events hold the tokens of prompts, and ZMQ asks no subscriber who it is: only this machine may reach the sockets.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from pdserve.base.errors import ConfigError
from pdserve.engine.kvcache import CacheChange, PagesStored
from pdserve.net.rpc import is_loopback
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.prefix_hash import PrefixHash, short_hashes
from pdserve.settings.config import WorkerConfig

logger = logging.getLogger(__name__)

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}  # vLLM's names; GPU is whatever computes
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MAX_UNSENT = 100_000  # messages that wait for one slow subscriber; beyond it that one misses some
YIELD_AFTER = 8  # messages of a replay, before others have their turn

AnySocket: TypeAlias = "zmq.Socket[bytes] | zmq.asyncio.Socket"


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """Blocks of one prefix, one after the other, can be reused from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=lambda: None)  # vLLM's own decoder wants these three present
    medium: str | None = msgspec.field(default_factory=lambda: None)
    lora_name: str | None = msgspec.field(default_factory=lambda: None)
    extra_keys: list[tuple[Any, ...] | None] | None = None  # a block each; the first one's has the salt, too
    group_idx: int | None = None  # of layers; None: the first


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """These blocks are about to be overwritten."""

    block_hashes: list[int]
    medium: str | None = msgspec.field(default_factory=lambda: None)
    group_idx: int | None = None


class _Batch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()


class KvPublisher:
    """One worker's publisher. Close it when the worker ends."""

    def __init__(
        self, config: WorkerConfig, endpoint: str, adapters: Sequence[link.Adapter] = (), page_size: int = 0
    ) -> None:
        """Bind; ConfigError where that cannot be.

        adapters: those that are loaded now. page_size: tokens in the largest pages; as configured unless given.
        """
        replay_endpoint, num_kept = config.kv_events_replay_endpoint, config.kv_events_buffer_steps
        self._page_size = page_size or config.page_size
        self._topic = config.kv_events_topic.encode()
        self._last = -1
        self._adapters = adapters
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=num_kept)  # numbers and batches
        self._context = zmq.asyncio.Context()
        self._pub = zmq.Context(self._context).socket(zmq.PUB)  # sends without waiting: not asyncio's
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            self._pub.sndhwm = MAX_UNSENT
            self._replay.sndhwm = max(MAX_UNSENT, num_kept + 1)  # it drops what is beyond
            self.endpoint = _bind(self._pub, endpoint, "kv_events_endpoint")
            key = "kv_events_replay_endpoint"
            self.replay_endpoint = "" if replay_endpoint is None else _bind(self._replay, replay_endpoint, key)
        except BaseException:
            self.close()
            raise
        logger.info("publishing KV events on %s", self.endpoint)

    def publish(self, changes: Sequence[CacheChange]) -> None:
        """Send a batch to all subscribers. Never blocks: who is too slow finds a gap, and may ask for a replay."""
        self._last += 1
        number = self._last.to_bytes(SEQUENCE_BYTES, "big")
        batch = _encoder.encode(_Batch(time.time(), [self._event(change) for change in changes]))
        self._sent.append((number, batch))
        self._pub.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    def _event(self, change: CacheChange) -> BlockStored | BlockRemoved:
        if not isinstance(change, PagesStored):
            return BlockRemoved(_numbers(change.hashes), MEDIA[change.tier], change.group or None)
        prefix, run, size = change.prefix, change.run, self._page_size
        is_first, name = run.start == 0, self._name(prefix.scope.adapter)
        return BlockStored(
            _numbers(change.hashes),
            None if is_first else _numbers(prefix.hashes[run.start - 1 : run.start])[0],
            list(prefix.token_ids[run.start * size : run.stop * size]),
            size,
            medium=MEDIA[change.tier],
            lora_name=name,
            extra_keys=_extra_keys(name, prefix.scope.salt if is_first else "", len(run)),
            group_idx=change.group or None,
        )

    def _name(self, adapter: AdapterDigest) -> str | None:
        if adapter == NO_ADAPTER:
            return None
        return next((each.name for each in self._adapters if each.digest == adapter), adapter.hex())

    async def serve_replays(self) -> None:
        """Answer who missed batches, until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
                logger.warning("a replay was asked for in %d frames that mean nothing", len(frames))
                continue
            await self._answer(*frames)

    async def _answer(self, client: bytes, empty: bytes, first: bytes) -> None:
        missed = [(number, batch) for number, batch in self._sent if number >= first]
        for count, (number, batch) in enumerate(missed, start=1):
            await self._replay.send_multipart((client, empty, self._topic, number, batch))
            if count % YIELD_AFTER == 0:
                await asyncio.sleep(0)  # sending waits for nobody
        await self._replay.send_multipart((client, empty, b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        for socket in (self._pub, self._replay):
            socket.close(linger=0)
        self._context.term()


def _extra_keys(adapter: str | None, salt: str, num_blocks: int) -> list[tuple[Any, ...] | None] | None:
    """Return what the hashes of blocks cover beside tokens, as vLLM writes it."""
    each = (adapter,) if adapter is not None else ()
    first = (*each, salt) if salt else each
    return [first or None, *[each or None] * (num_blocks - 1)] if first else None


def _numbers(hashes: Sequence[PrefixHash]) -> list[int]:
    """Return hashes as subscribers know them: numbers of 64 bits."""
    return short_hashes(b"".join(hashes))


@asynccontextmanager
async def publishing(config: WorkerConfig, register: link.Register) -> AsyncIterator[KvPublisher | None]:
    """Publish KV events for the length of the block, if the configuration says where, and register where.

    What breaks the replays breaks the block.
    """
    if config.kv_events_endpoint is None:
        yield None
        return
    publisher = KvPublisher(config, config.kv_events_endpoint, register.adapters, register.layout.page_size)
    register.kv_events_endpoint = publisher.endpoint
    register.kv_events_replay_endpoint = publisher.replay_endpoint
    try:
        async with asyncio.TaskGroup() as tasks:
            replaying = tasks.create_task(publisher.serve_replays(), name="kv event replays")
            yield publisher
            replaying.cancel()
    finally:
        publisher.close()


def _bind(socket: AnySocket, endpoint: str, key: str) -> str:
    """Bind and return where; the name of a free port's stands in what is returned."""
    scheme, separator, address = endpoint.partition("://")
    if not separator:
        raise ConfigError(f"{key}: {endpoint} is no endpoint such as tcp://127.0.0.1:5557 or ipc:///run/kv")
    if scheme != "ipc" and not is_loopback(address):
        raise ConfigError(f"{key}: {endpoint} may be reached from other machines, and subscribers are not identified")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: cannot listen on {endpoint}: {error}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
