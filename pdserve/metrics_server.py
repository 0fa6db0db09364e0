"""Shows a process's metrics over HTTP: GET /metrics, in Prometheus' text format.

Whoever reaches the port may read them: names of the model and of workers, counts and times, nothing that clients sent.
Answers are made on the process's event loop, so that they show one moment; the text is written in a thread.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pdserve.certificates import IDENTITY_FILES, KeyPair, read_identity, read_pair
from pdserve.config import ClientsConfig, ProcessConfig
from pdserve.errors import ConfigError
from pdserve.metrics import CERTIFICATE_END, Sample, families
from pdserve.rpc import join_address
from pdserve.watched import Watched

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0  # for all of a request and its answer
MAX_REQUEST_BYTES = 16_384
MAX_CONNECTIONS = 16
_MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Collect = Callable[[], Iterable[Sample]]


@asynccontextmanager
async def showing(config: ProcessConfig, collect: Collect) -> AsyncIterator[str]:
    """Show what `collect` returns for the length of the block, unless that is turned off.

    Yields host:port, empty where nothing is shown. ConfigError where the port or a certificate cannot be had.
    """
    if not config.metrics:
        yield ""
        return
    host, certificates = config.metrics_host, _certificates(config)
    scrapes = _Scrapes(lambda: (*collect(), *_certificate_ends(certificates)))
    try:
        server = await asyncio.start_server(scrapes.answer, host, config.metrics_port, limit=MAX_REQUEST_BYTES)
    except OSError as error:
        where = join_address(host, config.metrics_port)
        raise ConfigError(f"metrics_port: cannot listen on {where}: {error.strerror or error}") from error
    try:
        address = join_address(host, server.sockets[0].getsockname()[1])
        logger.info("metrics on http://%s/metrics", address)
        yield address
    finally:
        server.close()
        await scrapes.close()


def _certificates(config: ProcessConfig) -> dict[str, Watched[KeyPair]]:
    """Return what a process shows, by what shows it. Files that its listeners refuse are refused here, too."""
    found: dict[str, Watched[KeyPair]] = {}
    if config.identity_dir is not None:
        paths = tuple(config.identity_dir / name for name in IDENTITY_FILES)
        found["identity"] = Watched(paths, partial(_pair_of, config.identity_dir))
    if isinstance(config, ClientsConfig) and config.ssl_certfile is not None and config.ssl_keyfile is not None:
        paths = config.ssl_certfile, config.ssl_keyfile
        found["public"] = Watched(paths, partial(read_pair, *paths, ("ssl_certfile", "ssl_keyfile")))
    return found


def _pair_of(identity_dir: Path) -> KeyPair:
    return read_identity(identity_dir).pair


def _certificate_ends(certificates: Mapping[str, Watched[KeyPair]]) -> Iterator[Sample]:
    for name, files in certificates.items():
        yield Sample(CERTIFICATE_END, files.look().expires.timestamp(), (name,))


class _Scrapes:
    """Answers one request on each connection, to so many at once."""

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
            pass  # it has left, or sends what no scraper sends
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
    """Return what `collect` returns now, and the process's own metrics, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Moment(list(families(collect()))))
    ProcessCollector(registry=registry)
    return await asyncio.to_thread(generate_latest, registry)


class _Moment(Collector):
    def __init__(self, collected: Iterable[Family]) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Family]:
        return self._collected
