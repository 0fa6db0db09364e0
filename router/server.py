"""The router process: opens the model, listens on both ports, drains at a signal.

At SIGTERM, SIGINT or SIGHUP health becomes NOT_SERVING. Requests that arrive from then on are refused.
Those that run or wait may finish for `drain_timeout_s`; what is left then is ended with UNAVAILABLE. Both servers stop
LAST_WORDS_S later, and workers learn of it by the ends of their streams. `pdserve.base.signals` has the second signal.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

import grpc

from pdserve.base.clock import MonotonicClock, new_incarnation
from pdserve.base.collector import freeze_objects
from pdserve.base.processes import DRAIN_TIMED_OUT_STATUS
from pdserve.base.roles import Role
from pdserve.base.signals import CLOSING_S, drain_on_signals
from pdserve.net.certificates import Part
from pdserve.net.credentials import Connections, Credentials
from pdserve.net.health import answering
from pdserve.net.rpc import LAST_WORDS_S
from pdserve.observe.metrics_server import showing
from pdserve.perfmodel.profile import read_profile
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from pdserve.proto.v1.link_pb2_grpc import add_LinkServiceServicer_to_server
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.router.admin import AdminEndpoint
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.endpoints import Endpoints, open_endpoints
from pdserve.router.frontend.models import ModelRoute
from pdserve.router.frontend.served import ServedModel, load_model, served_name
from pdserve.router.frontends import Frontends
from pdserve.router.local_backend import LocalBackend
from pdserve.router.placement.policies import POLICIES
from pdserve.router.placement.predict import Predictor
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import ShutdownAsked, ShutdownDue
from pdserve.router.shell import Links, Shell

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a router listens, host:port, and what counts connections there."""

    public: str
    internal: str
    metrics: str  # empty: nowhere
    health: str
    http: str  # as a URL; empty: nowhere
    counted: Mapping[str, Connections]  # ports with TLS, by name


async def serve(config: RouterConfig) -> int:
    """Serve until a signal to stop, then finish what runs; return the exit status."""
    model = await asyncio.to_thread(load_model, config) if config.serve_clients else None
    freeze_objects()
    stop = asyncio.Event()
    with drain_on_signals(asyncio.get_running_loop(), stop.set, config.drain_timeout_s + CLOSING_S):
        has_drained = await run(config, model, stop)
    return 0 if has_drained else DRAIN_TIMED_OUT_STATUS


async def run(
    config: RouterConfig,
    model: ServedModel | None,
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None] = lambda _: None,
    port_key: str = "port",
) -> bool:
    """Serve a model until `stop` is set, then drain; return whether all requests finished in time.

    `model` is None where frontends serve the clients.
    `on_ready` gets the addresses. `port_key` is how the operator sets the port for clients.
    """
    start = None if config.profile is None else read_profile(config.profile).configuration(1).costs()
    credentials = Credentials.read(config.secret_file, config.identity_dir, Part.ROUTER)
    name = served_name(config) if model is None else model.name
    hasher = PrefixHasher(credentials.secret, name)
    predictor = Predictor(dict.fromkeys(Role, start) if start else None, hasher)
    core = RouterCore(name, config, POLICIES[config.placement](predictor), predictor)
    shell = Shell(core, MonotonicClock())
    backend = LocalBackend(shell, config, name, stop.is_set)
    backend.ports |= credentials.ports("internal")
    async with showing(config, backend.samples, credentials.identity) as metrics, answering(config) as answers:
        backend.admin.metrics_address = metrics
        frontends = Frontends(backend)
        server = _internal_server(config, credentials, shell, backend.admin)
        frontends.add_to(server)
        ending = _Ending(server)
        async with (
            asyncio.TaskGroup() as tasks,
            _listening(config, credentials, server, ending) as internal,
            _endpoints(config, model, backend, port_key) as endpoints,
        ):
            watching = tasks.create_task(_report_health(shell, endpoints.changed), name="health")
            showing_frontends = tasks.create_task(frontends.watch(), name="frontends")
            guarding = tasks.create_task(_raise_when_broken(shell), name="guard")
            await server.start()  # after the endpoints: launchers take a cluster for ready by what is said here
            answers.start(lambda: backend.readiness().is_ready)
            on_ready(Addresses(endpoints.public, internal, metrics, answers.address, endpoints.http, backend.ports))
            logger.info("workers on %s", internal)
            await stop.wait()
            endpoints.changed()
            frontends.show()
            has_drained = await _drain(shell, config.drain_timeout_s)
            frontends.close()
            shell.post(ShutdownDue())
            watching.cancel()
            showing_frontends.cancel()
            guarding.cancel()
            ending.begin()  # beside the endpoints' end
    return has_drained


def _endpoints(
    config: RouterConfig, model: ServedModel | None, backend: LocalBackend, port_key: str
) -> AbstractAsyncContextManager[Endpoints]:
    """Serve clients in this process, unless frontends alone do so."""
    if model is not None:
        route = ModelRoute(config, model, backend, backend.clients)
        return open_endpoints(config, (route,), instance=config.router_id, port_key=port_key)
    return nullcontext(Endpoints("", "", lambda: None))


@asynccontextmanager
async def _listening(
    config: RouterConfig, credentials: Credentials, server: grpc.aio.Server, ending: "_Ending"
) -> AsyncIterator[str]:
    """Have the internal server's port for the length of the block; yield its address."""
    try:
        yield credentials.listen(server, config.internal_host, config.internal_port, "internal_port")
    finally:
        await ending.begin()


class _Ending:
    """The end of a server, once: of two calls of `stop` at once, the later one may crash in a server that is gone."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None]:
        """Begin it, if it has not begun; the task is done when it is over."""
        if self._task is None:
            self._task = asyncio.create_task(self._server.stop(LAST_WORDS_S), name="internal server's end")
        return self._task


def _internal_server(
    config: RouterConfig, credentials: Credentials, shell: Shell, admin: AdminEndpoint
) -> grpc.aio.Server:
    server = credentials.server(lambda refusal: shell.refused.update([refusal]))
    welcome = link.Welcome(
        router_id=config.router_id,
        incarnation=new_incarnation(),
        wants_kv_events=config.kv_events == "link",
        wants_each_step=config.stream_interval is not None,
    )
    add_LinkServiceServicer_to_server(Links(shell, welcome), server)
    add_AdminServiceServicer_to_server(admin, server)
    return server


async def _report_health(shell: Shell, changed: Callable[[], None]) -> None:
    while True:
        before = shell.core.is_ready
        changed()
        await shell.until(lambda before=before: shell.core.is_ready != before)  # type: ignore[misc]


async def _raise_when_broken(shell: Shell) -> None:
    await shell.broken


async def _drain(shell: Shell, timeout_s: float) -> bool:
    """Take no more requests and let those that run finish. Returns whether none was left."""
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
    return has_drained
