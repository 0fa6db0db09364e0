"""Listens for HTTP: uvicorn's protocol on the router's own event loop. Signals and drains are the router's."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from pdserve.certificates import KeyPair, read_pair
from pdserve.errors import ConfigError
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.openai.app import App
from pdserve.router.frontend.openai.connection import HEAD_TIMEOUT_S, IDLE_TIMEOUT_S, Connection
from pdserve.rpc import check_bind, join_address
from pdserve.watched import Watched

BACKLOG = 1024
LAST_WORDS_S = 1.0  # for responses that are on their way when the server stops


@asynccontextmanager
async def serving_http(config: RouterConfig, app: App) -> AsyncIterator[str]:
    """Serve for the length of the block; yields the URL.

    ConfigError where the port cannot be had, or would be reachable by callers that nobody identifies.
    """
    has_identity = config.ssl_certfile is not None and config.api_keys_file is not None
    remedy = "set ssl_certfile, ssl_keyfile and api_keys_file, or http_host to 127.0.0.1"
    check_bind(config.http_host, has_identity=has_identity, key="http_host", remedy=remedy)
    state = ServerState()
    server = await _listen(config, partial(Connection, _uvicorn(app), state, {}))
    try:
        scheme = "http" if config.ssl_certfile is None else "https"
        yield f"{scheme}://{join_address(config.http_host, server.sockets[0].getsockname()[1])}"
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=LAST_WORDS_S)
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)


def _uvicorn(app: App) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what strangers send is no warning
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


async def _listen(config: RouterConfig, connect: Any) -> asyncio.Server:  # noqa: ANN401 - a protocol's factory
    host, port = config.http_host, config.http_port
    loop, shown = asyncio.get_running_loop(), _context(config.ssl_certfile, config.ssl_keyfile)
    handshake_s = None if shown is None else HEAD_TIMEOUT_S
    try:
        return await loop.create_server(
            connect, host, port, ssl=shown, backlog=BACKLOG, reuse_port=False, ssl_handshake_timeout=handshake_s
        )
    except OSError as error:
        raise ConfigError(f"http_port: cannot listen on {host}:{port}: {error.strerror or error}") from error


def _context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return what the port shows, looked at again for each connection; None without TLS."""
    if certificate is None or key is None:
        return None
    return RotatingContext(certificate, key).shown


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
