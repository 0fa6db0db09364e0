"""Listens for HTTP: uvicorn's protocol on the router's own event loop. The router handles signals and drains.

With TLS, each handshake uses the certificate that is in the files then, and at most MAX_HANDSHAKES are under way.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn
from uvicorn.server import ServerState

from pdserve.base.errors import ConfigError
from pdserve.base.watched_files import Watched
from pdserve.net.certificates import read_pair
from pdserve.net.rpc import HANDSHAKE_TIMEOUT_S, LAST_WORDS_S, bare_host, join_address, why_not_bound
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.openai.app import App
from pdserve.router.frontend.openai.connection import IDLE_TIMEOUT_S, Connection

MAX_HANDSHAKES = 512  # one more ends the oldest: an honest client's handshake takes milliseconds
BACKLOG = 1024
SHUTDOWN_TIMEOUT_S = 3600.0  # to flush, and to end TLS: `Connection` cuts off clients that do not read


class Handshakes:
    """Accepted connections whose TLS handshake is under way."""

    def __init__(
        self, certificate: Path, key: Path, connect: Callable[[], asyncio.Protocol], on_failed: Callable[[], None]
    ) -> None:
        """`connect` makes the protocol of a connection after its handshake; `on_failed` is called if that fails.

        ConfigError if the files are refused.
        """
        self._certificate = RotatingContext(certificate, key)
        self._connect, self._on_failed = connect, on_failed
        self._under_way: dict[asyncio.Task[None], None] = {}  # the oldest first

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, as `create_server` wants it."""
        return _Accepted(self._begin)

    def close(self) -> None:
        while self._under_way:
            self._give_up_oldest()

    def _begin(self, tcp: socket.socket) -> None:
        if len(self._under_way) >= MAX_HANDSHAKES:
            self._give_up_oldest()
            self._on_failed()

        def note_done(task: asyncio.Task[None]) -> None:
            self._under_way.pop(task, None)
            if task.cancelled():  # perhaps before it began
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
        except OSError:  # the peer failed or left
            self._on_failed()


class _Accepted(asyncio.Protocol):
    """Takes a connection from the transport that accepted it, which would read the bytes of TLS."""

    def __init__(self, begin: Callable[[socket.socket], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        with suppress(OSError):  # no file descriptor is left
            self._begin(transport.get_extra_info("socket").dup())
        transport.abort()


class RotatingContext:
    """TLS with a certificate whose files may change: each handshake uses the present ones."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._paths = certificate, key
        self._files = Watched(self._paths, partial(read_pair, certificate, key, ("ssl_certfile", "ssl_keyfile")))
        self._pair = self._files.look()
        self.shown = self._made()

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._paths, password="")
        context.sni_callback = self._choose
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give a handshake the present certificate. OpenSSL calls this even if the client asks for no name."""
        pair = self._files.look()
        if pair is not self._pair:
            self._pair, self.shown = pair, self._made()
        connection.context = self.shown


@asynccontextmanager
async def serving_http(config: EndpointConfig, app: App, on_failed: Callable[[], None]) -> AsyncIterator[str]:
    """Serve for the length of the block; yields the URL. ConfigError where the port cannot be had.

    `on_failed` is called for each connection whose TLS handshake fails.
    """
    state = ServerState()
    connect: Callable[[], asyncio.Protocol] = partial(Connection, _uvicorn(app), state, {})
    handshakes = None
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        handshakes = Handshakes(config.ssl_certfile, config.ssl_keyfile, connect, on_failed)
    server = await _listen(config, connect if handshakes is None else handshakes.accept)
    try:
        scheme = "http" if config.ssl_certfile is None else "https"
        yield f"{scheme}://{join_address(config.http_host, server.sockets[0].getsockname()[1])}"
    finally:
        server.close()
        if handshakes is not None:
            handshakes.close()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=LAST_WORDS_S)
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)


def _uvicorn(app: App) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # do not warn about what strangers send
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
    )
    config.load()
    return config


async def _listen(config: EndpointConfig, connect: Callable[[], asyncio.Protocol]) -> asyncio.Server:
    host, port = config.http_host, config.http_port or 0
    try:
        return await asyncio.get_running_loop().create_server(
            connect, bare_host(host), port, backlog=BACKLOG, reuse_port=config.may_share_ports
        )
    except OSError as error:
        why = why_not_bound(host, port, error)
        raise ConfigError(f"http_port: cannot listen on {join_address(host, port)}: {why}") from error
