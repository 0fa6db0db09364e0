"""Shows a process's metrics over HTTP: GET /metrics, in Prometheus' text format.

Whoever reaches the port may read them: they have the names of the model and of workers, counts and times, and nothing
that clients sent. Metrics are collected on the process's event loop, so they show one moment; a thread writes the text.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pdserve.base.errors import ConfigError
from pdserve.base.watched_files import Watched
from pdserve.net.certificates import Identity, KeyPair, read_pair
from pdserve.net.rpc import bare_host, join_address, why_not_bound
from pdserve.observe.metrics import CERTIFICATE_END, Sample, families
from pdserve.settings.config import ServingConfig
from pdserve.settings.process import ProcessConfig

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0  # for all of a request and its answer
MAX_REQUEST_BYTES = 16_384
MAX_CONNECTIONS = 16
_MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Collect = Callable[[], Iterable[Sample]]


@asynccontextmanager
async def showing(
    config: ProcessConfig, collect: Collect, identity: Watched[Identity] | None = None
) -> AsyncIterator[str]:
    """Serve what `collect` returns for the length of the block, unless metrics are off.

    `identity` is the process's certificate inside its cluster; a metric shows when it expires. Yields host:port, empty
    if metrics are off. ConfigError if the port cannot be bound or a certificate cannot be read.
    """
    if not config.metrics:
        yield ""
        return
    host, public = config.metrics_host, _public(config)
    scrapes = _Scrapes(lambda: (*collect(), *_certificate_ends(identity, public)))
    try:
        server = await asyncio.start_server(
            scrapes.answer, bare_host(host), config.metrics_port, limit=MAX_REQUEST_BYTES
        )
    except OSError as error:
        where = join_address(host, config.metrics_port)
        why = why_not_bound(host, config.metrics_port, error)
        raise ConfigError(f"metrics_port: cannot listen on {where}: {why}") from error
    try:
        address = join_address(host, server.sockets[0].getsockname()[1])
        logger.info("metrics on http://%s/metrics", address)
        yield address
    finally:
        server.close()
        await scrapes.close()


def _public(config: ProcessConfig) -> Watched[KeyPair] | None:
    """Return a process's certificate for clients, if it has one. Files that its listeners refuse are refused here."""
    if not isinstance(config, ServingConfig) or config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    paths = config.ssl_certfile, config.ssl_keyfile
    return Watched(paths, partial(read_pair, *paths, ("ssl_certfile", "ssl_keyfile")))


def _certificate_ends(identity: Watched[Identity] | None, public: Watched[KeyPair] | None) -> Iterator[Sample]:
    if identity is not None:
        yield Sample(CERTIFICATE_END, identity.look().pair.expires.timestamp(), ("identity",))
    if public is not None:
        yield Sample(CERTIFICATE_END, public.look().expires.timestamp(), ("public",))


class _Scrapes:
    """Answers one request on each connection, up to MAX_CONNECTIONS at once."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._open: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def close(self) -> None:
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(self._open)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if len(self._open) <= MAX_CONNECTIONS:
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._reply(request.decode("latin-1")))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the peer has left, or is no scraper
        finally:
            del self._open[task]
            writer.close()

    async def _reply(self, request: str) -> bytes:
        if not request.startswith("GET /metrics "):
            return _MISSING
        body = await metrics_text(self._collect)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE_PLAIN_0_0_4}\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"Connection: close\r\n\r\n" + body


async def metrics_text(collect: Collect) -> bytes:
    """Return what `collect` returns now and metrics of the process itself, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Moment(list(families(collect()))))
    ProcessCollector(registry=registry)
    return await asyncio.to_thread(generate_latest, registry)


class _Moment(Collector):
    def __init__(self, collected: Iterable[Family]) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Family]:
        return self._collected
