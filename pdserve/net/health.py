"""Serves grpc.health.v1: on a port of its own for the probes of Kubernetes, and on a router's public port.

The services on the port for probes, without TLS, are `live` (the event loop runs: a frozen one does not answer),
`started` (everything is loaded, and all ports are bound) and `ready` (requests may come). The empty name means `ready`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from pdserve.base.errors import echo
from pdserve.net.rpc import abort, listen, running, server_options
from pdserve.settings.process import ProcessConfig

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024
MAX_CALLS = 1024  # at once, on the port for probes
MAX_WATCHERS = 1024
READ_TIMEOUT_S = 1.0  # from the start of a call until its request has arrived

Holds = Callable[[], bool]
_Requests = AsyncIterator[bytes]
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, HealthCheckResponse]"


class HealthMethods:
    """The methods Check and Watch for fixed services. Callers do not authenticate.

    A slow caller does not delay others: no lock is held while a message is read or written.
    """

    def __init__(self, services: Mapping[str, Holds]) -> None:
        """`services`: for each name, whether the service is SERVING."""
        self._services = services
        self._num_watchers = 0
        self._change = asyncio.Event()

    def add_to(self, server: grpc.aio.Server, *, may_watch: bool) -> None:
        """Serve Check, and Watch if somebody will call `changed`."""
        # Streaming on both sides: such a handler reads its request itself, and can limit the time.
        served = {"Check": self._check, "Watch": self._watch} if may_watch else {"Check": self._check}
        to_bytes = HealthCheckResponse.SerializeToString
        handlers: dict[str, grpc.RpcMethodHandler[bytes, HealthCheckResponse]] = {
            name: grpc.stream_stream_rpc_method_handler(method, response_serializer=to_bytes)
            for name, method in served.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers),))

    def changed(self) -> None:
        """Let watchers check whether something has changed."""
        self._change.set()
        self._change = asyncio.Event()

    async def _check(self, requests: _Requests, context: _Context) -> None:
        holds = await self._asked(requests, context)
        await context.write(_reply(holds()))

    async def _watch(self, requests: _Requests, context: _Context) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} callers watch already, the limit")
        self._num_watchers += 1
        try:
            holds, shown = await self._asked(requests, context), None
            while True:
                change, found = self._change, holds()
                if found != shown:
                    await context.write(_reply(found))
                    shown = found
                await change.wait()
        finally:
            self._num_watchers -= 1

    async def _asked(self, requests: _Requests, context: _Context) -> Holds:
        """Read a call's request; return the service it asks about, or end the call."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                raw = await anext(requests, b"")
        except TimeoutError:
            await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {READ_TIMEOUT_S:g} s")
        if len(raw) > MAX_REQUEST_BYTES:
            text = f"message: {len(raw)} bytes are over the limit of {MAX_REQUEST_BYTES}"
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            service = HealthCheckRequest.FromString(raw).service
        except DecodeError as error:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"message: {error}")
        holds = self._services.get(service)
        if holds is None:
            await abort(context, grpc.StatusCode.NOT_FOUND, f"service: {echo(service, repr)} is not known here")
        return holds


def _reply(holds: bool) -> HealthCheckResponse:
    return HealthCheckResponse(status=HealthCheckResponse.SERVING if holds else HealthCheckResponse.NOT_SERVING)


class Health(HealthMethods):
    """A process's answers to probes. At first the process is not started."""

    def __init__(self) -> None:
        started = {"live": lambda: True, "started": lambda: self._is_ready is not None}
        super().__init__({**started, "ready": self._ready, "": self._ready})
        self.address = ""
        self._is_ready: Holds | None = None

    def start(self, is_ready: Holds) -> None:
        """Answer that the process has started; from now on each probe calls `is_ready`."""
        self._is_ready = is_ready

    def _ready(self) -> bool:
        return self._is_ready is not None and self._is_ready()


@asynccontextmanager
async def answering(config: ProcessConfig) -> AsyncIterator[Health]:
    """Answer probes for the length of the block. ConfigError if the port cannot be bound."""
    answers = Health()
    server = grpc.aio.server(options=server_options(MAX_REQUEST_BYTES), maximum_concurrent_rpcs=MAX_CALLS)
    answers.add_to(server, may_watch=False)
    answers.address = listen(server, config.health_host, config.health_port, "health_port")
    async with running(server):
        logger.info("health at %s", answers.address)
        yield answers
