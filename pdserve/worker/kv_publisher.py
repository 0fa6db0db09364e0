"""Publishes what changes in a worker's prefix cache over ZMQ, in vLLM's format, with a socket that replays the last
batches to subscribers who missed some.

A subscriber that missed more batches than are kept gets a snapshot in place of a replay: AllBlocksCleared, then all
that is cached. The snapshot's batches take the numbers of the missed ones; its last batch takes the number last
published.

On this machine anybody may subscribe. Beyond it, subscribers prove by CURVE that they know the cluster's secret.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from pdserve import kvevents
from pdserve.errors import ConfigError
from pdserve.worker.cached_pages import CachedPages
from pdserve.zmq_identity import AnySocket, CurveKeys, is_local

logger = logging.getLogger(__name__)

YIELD_AFTER = 8  # batches of a replay, before others have their turn


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Where and what a publisher publishes."""

    endpoint: str  # tcp://host:port (* takes a free one) or ipc://path
    replay_endpoint: str | None
    topic: str
    buffer_steps: int  # batches kept for replay
    max_unsent: int = 100_000  # batches that wait for one slow subscriber; beyond it that one misses some


class KvPublisher:
    """One worker's publisher. Close it when the worker ends."""

    def __init__(self, settings: PublisherSettings, secret: bytes, pages: CachedPages) -> None:
        """Bind; ConfigError where that cannot be. `pages` is what is cached, as far as it was published."""
        self._pages = pages
        self._topic = settings.topic.encode()
        self._last = -1
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._context = zmq.asyncio.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        endpoints = [settings.endpoint, *([settings.replay_endpoint] if settings.replay_endpoint else [])]
        keys = None if all(map(is_local, endpoints)) else self._require_keys(secret)
        self._pub = zmq.Context(self._context).socket(zmq.PUB)  # sends without waiting: not asyncio's
        self._sockets: list[AnySocket] = [self._pub]
        try:
            self._pub.sndhwm = settings.max_unsent
            self.endpoint = _bind(self._pub, settings.endpoint, keys, "kv_events_endpoint")
            self._replay: zmq.asyncio.Socket | None = None
            self.replay_endpoint = ""
            if settings.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.sndhwm = max(settings.max_unsent, settings.buffer_steps + 1)  # it drops what is beyond
                self._sockets.append(self._replay)
                self.replay_endpoint = _bind(self._replay, settings.replay_endpoint, keys, "kv_events_replay_endpoint")
        except BaseException:
            self.close()
            raise
        logger.info("publishing KV events on %s", self.endpoint)

    def _require_keys(self, secret: bytes) -> CurveKeys:
        keys = CurveKeys.of(secret)
        self._authenticator = keys.authenticator(self._context)
        return keys

    def publish(self, batch: bytes) -> None:
        """Send a batch to all subscribers. Never blocks: who is too slow finds a gap, and may ask for a replay."""
        self._last += 1
        number = self._last.to_bytes(kvevents.SEQUENCE_BYTES, "big")
        self._sent.append((number, batch))
        self._pub.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

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
        """Return what is cached in place of the batches from the first one on, up to the last one published by then."""
        listener, events = self._pages.listen(), list[kvevents.KvEvent]((kvevents.AllBlocksCleared(),))
        try:
            while True:
                events += self._pages.next_events(listener)
                is_last = not self._pages.has_news(listener)
                number = self._last if is_last else min(first, self._last)
                yield number.to_bytes(kvevents.SEQUENCE_BYTES, "big"), kvevents.encode(events, time.time())
                if is_last:
                    return
                first, events = first + 1, []
        finally:
            self._pages.leave(listener)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


def _bind(socket: AnySocket, endpoint: str, keys: CurveKeys | None, key: str) -> str:
    """Bind and return where; the name of a free port's stands in what is returned."""
    if keys is not None:
        keys.guard(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: cannot listen on {endpoint}: {error}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
