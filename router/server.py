"""The router process: opens the model, listens on both ports, drains at a signal.

At SIGTERM or SIGINT health becomes NOT_SERVING. Requests that arrive from then on are refused.
Those that run or wait may finish for `drain_timeout_s`; what is left then is ended with UNAVAILABLE. Both servers stop
LAST_WORDS_S later, and workers learn of it by the ends of their streams. `pdserve.signals` has the second signal.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from pdserve.certificates import Part
from pdserve.checkpoint.archive import tokenizer_archive
from pdserve.checkpoint.checkpoint import NO_DEFAULTS, naming
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.clock import Clock, MonotonicClock
from pdserve.credentials import Credentials, public_credentials
from pdserve.errors import ConfigError
from pdserve.health import HealthMethods, answering
from pdserve.incarnation import new_incarnation
from pdserve.metrics_server import showing
from pdserve.prefix_hash import PrefixHasher
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from pdserve.proto.v1.link_pb2_grpc import add_LinkServiceServicer_to_server
from pdserve.roles import Role
from pdserve.router.admin import AdminEndpoint
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.events import ShutdownAsked, ShutdownDue
from pdserve.router.frontend.dialects.doors import DIALECTS, add_dialects
from pdserve.router.frontend.generate import INFERENCE_SERVICE, InferenceEndpoint
from pdserve.router.frontend.grpc_door import HARD_LIMIT_BYTES, LimitSizes, RequireKey
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.prompts import Prompts, ServedModel
from pdserve.router.frontend.records import Records
from pdserve.router.frontend.state import RouterState
from pdserve.router.kv_subscriber import KvSubscriber, PublishedBlocks, Source
from pdserve.router.metrics import router_samples
from pdserve.router.policies import POLICIES
from pdserve.router.predict import Predictor
from pdserve.router.shell import Follow, Links, Shell, WorkerStream
from pdserve.rpc import check_bind, listen, server_options
from pdserve.signals import DRAIN_TIMED_OUT_STATUS, drain_on_signals
from pdserve.text.parsers.reasoning import reasoning_of
from pdserve.text.parsers.tool_calls import FORMATS, format_of

if TYPE_CHECKING:
    from pdserve.tracing import SpanExport

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # for replies and statuses that are on their way when the servers stop
CLOSING_S = 5.0  # after a drain: last words of HTTP, then of gRPC, then the last spans; and a second to spare


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a router listens, host:port."""

    public: str
    internal: str
    metrics: str  # empty: nowhere
    health: str
    http: str  # as a URL; empty: nowhere


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs and return."""
    model = await asyncio.to_thread(load_model, config)
    stop = asyncio.Event()
    with drain_on_signals(asyncio.get_running_loop(), stop.set, config.drain_timeout_s + CLOSING_S):
        has_drained = await run(config, model, stop)
    if not has_drained:
        raise SystemExit(DRAIN_TIMED_OUT_STATUS)


def load_model(config: RouterConfig) -> ServedModel:
    """Read the model's config, tokenizer and chat template."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    tokenizer = checkpoint.tokenizer()
    vocab_size = min(tokenizer.vocab_size, checkpoint.config.vocab_size)
    defaults = NO_DEFAULTS
    if config.generation_config == "auto":
        with naming(checkpoint.path):
            defaults = checkpoint.generation.within(vocab_size)
        if defaults != NO_DEFAULTS:
            logger.info("sampling defaults of the model's generation_config.json: %s", defaults.sampling())
    source, chat = checkpoint.chat_template or "", checkpoint.chat()
    parser = config.tool_call_parser
    return ServedModel(
        name=config.served_model_name or checkpoint.name,
        max_model_len=checkpoint.config.max_position_embeddings,
        vocab_size=vocab_size,
        defaults=defaults,
        tokenizer=tokenizer,
        chat=chat,
        special_tokens=checkpoint.special_tokens,
        eos_token_ids=checkpoint.ends(tokenizer),
        tool_format=format_of(source) if parser == "auto" else FORMATS[parser],
        reasoning=None if chat is None else reasoning_of(config.reasoning_parser, source, chat),
        model_type=str(checkpoint.raw_config.get("model_type", "")),
        aliases=config.served_model_aliases,
        architectures=(checkpoint.config.architecture,),
        archived=partial(tokenizer_archive, checkpoint),
    )


async def run(
    config: RouterConfig,
    model: ServedModel,
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None] = lambda _: None,
) -> bool:
    """Serve a model until `stop` is set, then drain; return whether all requests finished in time.

    `on_ready` gets the addresses.
    """
    start = config.start_costs()
    credentials = Credentials.read(config.secret_file, config.identity_dir, Part.ROUTER)
    hasher = PrefixHasher(credentials.secret, model.name)
    predictor = Predictor(dict.fromkeys(Role, start) if start else None, hasher)
    core = RouterCore(model.name, config, POLICIES[config.placement](predictor), predictor)
    shell = Shell(core, MonotonicClock())
    prompts = Prompts(model, config.max_num_tokenizing, config.tokenize_timeout_s)
    export = _span_export(config)
    records = Records(model.name, config, export)
    intake = Intake(shell, model, prompts, config, records)
    serves = dict.fromkeys((INFERENCE_SERVICE, *DIALECTS), lambda: core.is_ready and not stop.is_set())
    shown = HealthMethods({"": lambda: not stop.is_set(), **serves})
    collect = partial(router_samples, shell, intake.outcomes, intake.clients, records.span_counts, model.name)
    awaited = Awaited(lambda: core.is_ready, config.pool_grace_s, shell.clock)
    try:
        async with showing(config, collect) as metrics, answering(config) as answers:
            admin = AdminEndpoint(shell, config.router_id, model.name, metrics)
            state = RouterState(
                is_live=lambda: not stop.is_set(),
                is_ready=lambda: not stop.is_set() and awaited.holds(),
                collect=collect if config.metrics else None,
                live=admin.live,
            )
            servers = _public_server(intake, shown, state, shell), _internal_server(config, credentials, shell, admin)
            async with (
                _listening(config, credentials, *servers) as (public, internal),
                _listening_http(config, intake, state) as http,
                asyncio.TaskGroup() as tasks,
            ):
                watching = tasks.create_task(_report_health(shell, shown), name="health")
                guarding = tasks.create_task(_raise_when_broken(shell), name="guard")
                answers.start(state.is_ready)
                on_ready(Addresses(public, internal, metrics, answers.address, http))
                logger.info("serving %s on %s, workers on %s", model.name, public, internal)
                if http:
                    logger.info("serving OpenAI's API at %s", http)
                await stop.wait()
                shown.changed()
                has_drained = await _drain(shell, config.drain_timeout_s)
                watching.cancel()
                guarding.cancel()
        return has_drained
    finally:
        await prompts.close()
        if export is not None:
            await export.close()


def _span_export(config: RouterConfig) -> "SpanExport | None":
    if config.otlp_traces_endpoint is None:
        return None
    from pdserve.tracing import SpanExport  # noqa: PLC0415 - takes long to import

    return SpanExport(config.otlp_traces_endpoint, "pdserve-router", config.router_id)


class Awaited:
    """Whether requests may come: some pair of workers can serve, or could so lately that they wait for another."""

    def __init__(self, is_ready: Callable[[], bool], grace_s: float, clock: Clock) -> None:
        self._is_ready = is_ready
        self._grace_s = grace_s
        self._clock = clock
        self._until_s = -inf

    def holds(self) -> bool:
        """Look at it now. Only what was seen counts, so whoever wants to know looks often."""
        now_s = self._clock.now_s()
        if not self._is_ready():
            return now_s < self._until_s
        self._until_s = now_s + self._grace_s
        return True


@asynccontextmanager
async def _listening(
    config: RouterConfig, credentials: Credentials, public: grpc.aio.Server, internal: grpc.aio.Server
) -> AsyncIterator[tuple[str, str]]:
    """Run both servers for the length of the block; yield their addresses."""
    has_identity = config.ssl_certfile is not None and config.api_keys_file is not None
    remedy = "set ssl_certfile, ssl_keyfile and api_keys_file, or host to 127.0.0.1"
    check_bind(config.host, has_identity=has_identity, remedy=remedy)
    addresses = (
        listen(public, config.host, config.port, "port", _public_credentials(config)),
        credentials.listen(internal, config.internal_host, config.internal_port, "internal_port"),
    )
    await internal.start()
    await public.start()
    try:
        yield addresses
    finally:
        await asyncio.gather(public.stop(LAST_WORDS_S), internal.stop(LAST_WORDS_S))


@asynccontextmanager
async def _listening_http(config: RouterConfig, intake: Intake, state: RouterState) -> AsyncIterator[str]:
    """Serve HTTP for the length of the block, unless that is turned off; yield its URL, empty where it is."""
    if config.http_port is None:
        yield ""
        return
    from pdserve.router.frontend.openai.app import App  # noqa: PLC0415 - takes long to import
    from pdserve.router.frontend.openai.server import serving_http  # noqa: PLC0415

    async with serving_http(config, App(intake, state)) as url:
        yield url


def _public_server(intake: Intake, shown: HealthMethods, state: RouterState, shell: Shell) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[RequireKey(intake.clients), LimitSizes()], options=server_options(HARD_LIMIT_BYTES)
    )
    InferenceEndpoint(intake).add_to(server)
    shown.add_to(server, may_watch=True)
    add_dialects(server, intake, state, shell)
    names = (INFERENCE_SERVICE, *DIALECTS, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _public_credentials(config: RouterConfig) -> grpc.ServerCredentials | None:
    match config.ssl_certfile, config.ssl_keyfile:
        case Path() as certificate, Path() as key:
            return public_credentials(certificate, key)
        case None, None:
            return None
        case _:
            raise ConfigError("ssl_certfile: goes with ssl_keyfile, and one of them is not set")


def _internal_server(
    config: RouterConfig, credentials: Credentials, shell: Shell, admin: AdminEndpoint
) -> grpc.aio.Server:
    server = credentials.server(lambda refusal: shell.refused.update([refusal]))
    welcome = link.Welcome(
        router_id=config.router_id, incarnation=new_incarnation(), wants_kv_events=config.kv_events == "link"
    )
    follow = _follower(shell, credentials.secret) if config.kv_events == "zmq" else None
    add_LinkServiceServicer_to_server(Links(shell, welcome, follow), server)
    add_AdminServiceServicer_to_server(admin, server)
    return server


def _follower(shell: Shell, secret: bytes) -> Follow:
    def follow(stream: WorkerStream) -> Coroutine[object, object, None]:
        worker, link_id = stream.registration, stream.link_id
        source = Source(worker.kv_events_endpoint, worker.kv_events_replay_endpoint)
        blocks = PublishedBlocks(link_id, shell.core.predictor.prefixes.hasher)
        return KvSubscriber(source, secret, blocks, shell.post).follow()

    return follow


async def _report_health(shell: Shell, shown: HealthMethods) -> None:
    while True:
        before = shell.core.is_ready
        shown.changed()
        await shell.until(lambda before=before: shell.core.is_ready != before)  # type: ignore[misc]


async def _raise_when_broken(shell: Shell) -> None:
    await shell.broken


async def _drain(shell: Shell, timeout_s: float) -> bool:
    """Take no more requests and let those that run finish; end those that are left in the end.

    Returns whether none was left.
    """
    shell.post(ShutdownAsked())
    logger.info("draining %d requests", shell.core.num_active + shell.core.num_held)
    try:
        async with asyncio.timeout(timeout_s):
            await shell.until(lambda: not shell.core.num_active and not shell.core.num_held)
    except TimeoutError:
        logger.warning("%d requests did not finish within %g s", shell.core.num_active, timeout_s)
        has_drained = False
    else:
        has_drained = True
    shell.post(ShutdownDue())
    return has_drained
