"""Listens for HTTP: uvicorn's protocol on the router's own event loop. Signals and drains are the router's."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from uvicorn.server import ServerState

from pdserve.errors import ConfigError
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.doors import LAST_WORDS_S, http_url
from pdserve.router.frontend.openai.app import App
from pdserve.router.frontend.openai.connection import IDLE_TIMEOUT_S, Connection
from pdserve.router.frontend.openai.handshakes import Handshakes

BACKLOG = 1024


@asynccontextmanager
async def serving_http(config: RouterConfig, app: App, on_failed: Callable[[], None]) -> AsyncIterator[str]:
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
        yield http_url(config, server.sockets[0].getsockname()[1])
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


async def _listen(config: RouterConfig, connect: Callable[[], asyncio.Protocol]) -> asyncio.Server:
    host, port = config.http_host, config.http_port
    try:
        return await asyncio.get_running_loop().create_server(
            connect, host, port, backlog=BACKLOG, reuse_port=config.num_frontends > 1
        )
    except OSError as error:
        raise ConfigError(f"http_port: cannot listen on {host}:{port}: {error.strerror or error}") from error
