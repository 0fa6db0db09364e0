"""TLS of the HTTP port: the certificate that is there, and handshakes of which there are never too many."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

from pdserve.certificates import KeyPair, read_pair
from pdserve.rpc import HANDSHAKE_TIMEOUT_S
from pdserve.watched import Watched

MAX_HANDSHAKES = 512  # with one more the oldest ends: an honest client's takes milliseconds
SHUTDOWN_TIMEOUT_S = 2.0  # for a peer to end the connection, too


class Handshakes:
    """Connections that were accepted and have not shaken hands."""

    def __init__(self, certificate: Path, key: Path, connect: Callable[[], asyncio.Protocol]) -> None:
        """`connect` makes the protocol of a connection that has. ConfigError where the files are refused."""
        self._certificate = RotatingContext(certificate, key)
        self._connect = connect
        self._under_way: dict[asyncio.Task[None], asyncio.Transport] = {}  # the oldest first

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a connection to come."""
        return _Accepted(self._begin)

    def close(self) -> None:
        """End all that are under way."""
        for task in self._under_way:
            self._give_up(task)

    def _begin(self, transport: asyncio.Transport, accepted: "_Accepted") -> None:
        if len(self._under_way) >= MAX_HANDSHAKES:
            self._give_up(next(iter(self._under_way)))
        task = asyncio.create_task(self._shake(transport, accepted), name="handshake")
        self._under_way[task] = transport
        task.add_done_callback(self._under_way.pop)

    def _give_up(self, task: asyncio.Task[None]) -> None:
        self._under_way[task].abort()
        task.cancel()

    async def _shake(self, transport: asyncio.Transport, accepted: "_Accepted") -> None:
        try:
            shown = await asyncio.get_running_loop().start_tls(
                transport,
                accepted,
                self._certificate.shown,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError:  # the peer's fault, or its absence
            transport.abort()
            return
        if shown is not None and not accepted.is_lost:
            accepted.hand_over(shown, self._connect())


class _Accepted(asyncio.Protocol):
    """One connection. What comes right behind its handshake waits for the protocol that is to have it."""

    def __init__(self, begin: Callable[[asyncio.Transport, "_Accepted"], None]) -> None:
        self._begin = begin
        self._early: list[bytes] = []
        self.is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._begin(transport, self)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.is_lost = True

    def hand_over(self, transport: asyncio.Transport, connection: asyncio.Protocol) -> None:
        """Let a protocol have the connection."""
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for data in self._early:
            connection.data_received(data)


class RotatingContext:
    """TLS with a certificate whose files may change: each handshake takes what is there."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = certificate, key
        self._files = Watched(self._paths, self._read)
        self._pair = self._files.look()
        self.shown = self._made()

    def _read(self) -> KeyPair:
        return read_pair(*self._paths, ("ssl_certfile", "ssl_keyfile"))

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._paths, password="")
        context.sni_callback = self._choose
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give a handshake the certificate that is there. OpenSSL calls it whether a name is asked for or not."""
        del name, context
        pair = self._files.look()
        if pair is not self._pair:
            self._pair, self.shown = pair, self._made()
        connection.context = self.shown
