"""Publishes what changes in a worker's prefix cache over ZMQ, in vLLM's format, with a socket that replays the last
batches to subscribers who missed some.

On this machine anybody may subscribe. Beyond it, subscribers prove by CURVE that they know the cluster's secret.
"""

import logging
from collections import deque
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from pdserve import kvevents
from pdserve.errors import ConfigError
from pdserve.zmq_identity import AnySocket, CurveKeys, is_local

logger = logging.getLogger(__name__)


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

    def __init__(self, settings: PublisherSettings, secret: bytes) -> None:
        """Bind; ConfigError where that cannot be."""
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
        for number, payload in tuple(self._sent):
            if number >= first:
                await replay.send_multipart((client, empty, self._topic, number, payload))
        await replay.send_multipart((client, empty, b"", kvevents.END_OF_REPLAY, b""))

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
