"""Serves a process's health for the probes of Kubernetes: grpc.health.v1, without TLS, on a port of its own.

Services: `live` (the event loop turns: a frozen one does not answer), `started` (what there is to load is loaded, and
all ports are bound), `ready` (requests may come); the empty name is `ready`. Nothing else is served there.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from pdserve.config import ProcessConfig
from pdserve.errors import echo
from pdserve.rpc import abort, listen, server_options

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024
MAX_CALLS = 64  # at once


class Health:
    """What a process answers to probes; not started at first."""

    def __init__(self) -> None:
        self.address = ""
        self._is_ready: Callable[[], bool] | None = None

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Let the process count as started; from here on, `is_ready` is asked at each probe."""
        self._is_ready = is_ready

    async def check(
        self,
        request: HealthCheckRequest,
        context: "grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]",
    ) -> HealthCheckResponse:
        """Answer grpc.health.v1.Health/Check."""
        match request.service:
            case "live":
                holds = True
            case "started":
                holds = self._is_ready is not None
            case "ready" | "":
                holds = self._is_ready is not None and self._is_ready()
            case other:
                text = f"service: {echo(other, repr)} is neither live nor started nor ready"
                await abort(context, grpc.StatusCode.NOT_FOUND, text)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if holds else HealthCheckResponse.NOT_SERVING)


@asynccontextmanager
async def answering(config: ProcessConfig) -> AsyncIterator[Health]:
    """Answer probes for the length of the block. ConfigError where the port cannot be had."""
    answers = Health()
    server = grpc.aio.server(options=server_options(MAX_REQUEST_BYTES), maximum_concurrent_rpcs=MAX_CALLS)
    check = grpc.unary_unary_rpc_method_handler(
        answers.check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),))
    answers.address = listen(server, config.health_host, config.health_port, "health_port")
    await server.start()
    logger.info("health at %s", answers.address)
    try:
        yield answers
    finally:
        await server.stop(None)
