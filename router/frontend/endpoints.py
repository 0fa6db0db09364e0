"""Opens the endpoints for clients: gRPC with its dialects, and HTTP."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from pdserve.base.errors import ConfigError
from pdserve.net.credentials import Connections, NoteCallers, public_credentials
from pdserve.net.health import HealthMethods
from pdserve.net.rpc import LAST_WORDS_S, check_bind, listen, running, server_options
from pdserve.proto.v1.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.dialects.open_inference import OpenInference
from pdserve.router.frontend.grpc_endpoint import (
    HARD_LIMIT_BYTES,
    INFERENCE_SERVICE,
    InferenceEndpoint,
    LimitSizes,
    RequireKey,
)
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.models import ModelRoute, Models
from pdserve.router.frontend.next_turns import NextTurns
from pdserve.router.frontend.prompts import Prompts
from pdserve.router.frontend.records import Records

if TYPE_CHECKING:
    from pdserve.observe.tracing import SpanExport

logger = logging.getLogger(__name__)

HAS_VLLM = find_spec("smg_grpc_proto") is not None  # the extra `dialects` installs it
OPEN_INFERENCE, VLLM_ENGINE = "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"  # services


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where clients connect."""

    public: str  # host:port of gRPC
    http: str  # a URL; empty: HTTP is off
    changed: Callable[[], None]  # to be called when the router's readiness may have changed


def check_endpoints(config: EndpointConfig) -> None:
    """Raise ConfigError if other machines could reach a port that identifies no callers, or TLS files are unusable."""
    has_identity = config.ssl_certfile is not None and config.api_keys_file is not None
    remedy = "set ssl_certfile, ssl_keyfile and api_keys_file, or {} to 127.0.0.1"
    check_bind(config.host, has_identity=has_identity, remedy=remedy.format("host"))
    if config.http_port is not None:
        check_bind(config.http_host, has_identity=has_identity, key="http_host", remedy=remedy.format("http_host"))
    _credentials(config, Connections())


@asynccontextmanager
async def open_endpoints(
    config: EndpointConfig,
    routes: Sequence[ModelRoute],
    *,
    instance: str,
    port_key: str = "port",
) -> AsyncIterator[Endpoints]:
    """Serve the clients of models for the length of the block. ConfigError as `check_endpoints`, or for a port in use.

    `instance`: the process's name in spans. `port_key`: the setting that has the port of gRPC.
    """
    check_endpoints(config)
    export = _span_export(config, instance)
    async with AsyncExitStack() as stack:
        if export is not None:
            stack.push_async_callback(export.close)
        models = Models([await stack.enter_async_context(_taking_in(route, export)) for route in routes])
        if export is not None:
            models.first.backend.span_counts = lambda: export.counts
        shown = HealthMethods(_health(models))
        server = _server(config, models, shown)
        connections = models.first.backend.connections
        public = listen(server, config.host, config.port, port_key, _credentials(config, connections))
        await stack.enter_async_context(running(server, LAST_WORDS_S))
        http = await stack.enter_async_context(_listening_http(config, models, instance))
        logger.info("serving %s on %s", ", ".join(each.model.name for each in models), public)
        if http:
            logger.info("serving OpenAI's API at %s", http)
        yield Endpoints(public, http, shown.changed)


@asynccontextmanager
async def _taking_in(route: ModelRoute, export: "SpanExport | None") -> AsyncIterator[Intake]:
    """Prepare requests of a model for the length of the block."""
    config, model, backend = route.config, route.model, route.backend
    prompts = Prompts(
        model, config.max_num_tokenizing, config.tokenize_timeout_s, lenient_schemas=config.lenient_schemas
    )
    try:
        intake = Intake(backend, model, prompts, route.clients, config, Records(model.name, config, export))
        async with NextTurns(backend, prompts, model.tokenizer, intake.max_model_len) as next_turns:
            intake.next_turns = next_turns
            yield intake
    finally:
        await prompts.close()


def _health(models: Models) -> dict[str, Callable[[], bool]]:
    """Return what health says: of the process, of each service, and of each model by its names."""
    of_models: dict[str, Callable[[], bool]] = {
        name: lambda intake=intake: intake.backend.readiness().can_serve  # type: ignore[misc]
        for intake in models
        for name in intake.model.names
    }
    serves = dict.fromkeys(_services(models), lambda: models.can_serve)
    return {**of_models, **serves, "": lambda: models.is_live}


def _services(models: Models) -> tuple[str, ...]:
    """Return the services that generate."""
    return (INFERENCE_SERVICE, OPEN_INFERENCE, *((VLLM_ENGINE,) if _serves_vllm_engine(models) else ()))


def _serves_vllm_engine(models: Models) -> bool:
    """Whether vLLM's service is served. It has no names of models."""
    return HAS_VLLM and len(models) == 1


def _span_export(config: EndpointConfig, instance: str) -> "SpanExport | None":
    if config.otlp_traces_endpoint is None:
        return None
    from pdserve.observe.tracing import SpanExport  # noqa: PLC0415 - takes long to import

    return SpanExport(config.otlp_traces_endpoint, "pdserve-router", instance)


def _server(config: EndpointConfig, models: Models, shown: HealthMethods) -> grpc.aio.Server:
    interceptors: list[grpc.aio.ServerInterceptor] = [RequireKey(models.first.clients), LimitSizes()]
    if config.ssl_certfile is not None:
        interceptors.insert(0, NoteCallers(models.first.backend.connections))
    server = grpc.aio.server(
        interceptors=interceptors,
        options=server_options(HARD_LIMIT_BYTES, shares_port=config.may_share_ports),
    )
    InferenceEndpoint(models).add_to(server)
    shown.add_to(server, may_watch=True)
    add_GRPCInferenceServiceServicer_to_server(OpenInference(models), server)
    if _serves_vllm_engine(models):
        from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server  # noqa: PLC0415

        from pdserve.router.frontend.dialects.vllm_engine import VllmEngine  # noqa: PLC0415

        add_VllmEngineServicer_to_server(VllmEngine(models.first), server)
    names = (*_services(models), health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _credentials(config: EndpointConfig, connections: Connections) -> grpc.ServerCredentials | None:
    match config.ssl_certfile, config.ssl_keyfile:
        case Path() as certificate, Path() as key:
            return public_credentials(certificate, key, connections)
        case None, None:
            return None
        case _:
            raise ConfigError("ssl_certfile: goes with ssl_keyfile, and one of them is not set")


@asynccontextmanager
async def _listening_http(config: EndpointConfig, models: Models, owner: str) -> AsyncIterator[str]:
    """Serve HTTP for the length of the block; yield its URL, empty if HTTP is off. `owner`: the process's name."""
    if config.http_port is None:
        yield ""
        return
    from pdserve.router.frontend.openai.app import App  # noqa: PLC0415 - takes long to import
    from pdserve.router.frontend.openai.server import serving_http  # noqa: PLC0415
    from pdserve.router.frontend.responses.door import open_responses  # noqa: PLC0415

    async with open_responses(config, models, owner) as responses:
        app = App(models, config, responses)
        async with serving_http(config, app, models.first.clients.note_failed_handshake) as url:
            yield url
