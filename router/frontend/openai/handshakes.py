"""TLS of the HTTP port: the certificate that is there, and handshakes of which there are never too many."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pdserve.certificates import KeyPair, read_pair
from pdserve.rpc import HANDSHAKE_TIMEOUT_S
from pdserve.watched import Watched

MAX_HANDSHAKES = 512  # with one more the oldest ends: an honest client's takes milliseconds
SHUTDOWN_TIMEOUT_S = 3600.0  # to flush, and to end TLS: whoever takes nothing is cut off by `Connection`


class Handshakes:
    """Connections that were accepted and have not shaken hands."""

    def __init__(
        self, certificate: Path, key: Path, connect: Callable[[], asyncio.Protocol], on_failed: Callable[[], None]
    ) -> None:
        """`connect` makes the protocol of a connection that has; `on_failed` is called for each that ends before.

        ConfigError where the files are refused.
        """
        self._certificate = RotatingContext(certificate, key)
        self._connect, self._on_failed = connect, on_failed
        self._under_way: dict[asyncio.Task[None], None] = {}  # the oldest first

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a connection to come."""
        return _Accepted(self._begin)

    def close(self) -> None:
        """End all that are under way."""
        while self._under_way:
            self._give_up_oldest()

    def _begin(self, tcp: socket.socket) -> None:
        if len(self._under_way) >= MAX_HANDSHAKES:
            self._give_up_oldest()
            self._on_failed()

        def note_done(task: asyncio.Task[None]) -> None:
            self._under_way.pop(task, None)
            if task.cancelled():  # maybe before it began
                tcp.close()

        task = asyncio.create_task(self._shake(tcp), name="handshake")
        self._under_way[task] = None
        task.add_done_callback(note_done)

    def _give_up_oldest(self) -> None:
        task = next(iter(self._under_way))
        del self._under_way[task]
        task.cancel()

    async def _shake(self, tcp: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                tcp,
                ssl=self._certificate.shown,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError:  # the peer's fault, or its absence
            self._on_failed()


class _Accepted(asyncio.Protocol):
    """Takes a connection from the transport that accepted it, which would read what is meant for TLS."""

    def __init__(self, begin: Callable[[socket.socket], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        with suppress(OSError):  # no descriptor is left
            self._begin(transport.get_extra_info("socket").dup())
        transport.abort()


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
