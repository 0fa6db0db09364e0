"""A frontend: serves clients in a process of its own, for the routers that it attaches to, of one model or of several.

At SIGTERM or SIGINT health becomes NOT_SERVING. Requests that run or wait may finish for `drain_timeout_s`. What is
left then is ended with UNAVAILABLE.
"""

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress

import grpc

from pdserve.base.collector import freeze_objects
from pdserve.base.processes import DRAIN_TIMED_OUT_STATUS
from pdserve.base.signals import CLOSING_S, drain_on_signals
from pdserve.net.certificates import Part
from pdserve.net.credentials import Credentials
from pdserve.net.dns import Lookups
from pdserve.net.health import answering
from pdserve.net.rpc import identify
from pdserve.observe.metrics import REQUESTS_RESUMED, REQUESTS_WITHOUT_ROUTER, Sample
from pdserve.observe.metrics_server import showing
from pdserve.router.config import FrontendConfig
from pdserve.router.frontend.channel import ATTACH
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.endpoints import open_endpoints
from pdserve.router.frontend.models import ModelRoute, check_names
from pdserve.router.frontend.routers import RouterLink, Routers
from pdserve.router.frontend.served import ServedModel, load_model

logger = logging.getLogger(__name__)

GOODBYE_S = 1.0  # for a router to hear that this process stops
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.5  # between two attempts to attach: a router that starts is found that soon


async def serve(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs; return the exit status."""
    models = [await asyncio.to_thread(load_model, each) for each in config.of_models()]
    check_names(models)
    freeze_objects()
    stop = asyncio.Event()
    with drain_on_signals(asyncio.get_running_loop(), stop.set, config.drain_timeout_s + CLOSING_S):
        has_drained = await run(config, models, stop)
    return 0 if has_drained else DRAIN_TIMED_OUT_STATUS


async def run(config: FrontendConfig, models: Sequence[ServedModel], stop: asyncio.Event) -> bool:
    """Serve models until `stop` is set, then drain; return whether all requests finished in time.

    `models`: in the order of `config.of_models()`. Each has routers, and counts of its tenants, of its own.
    """
    credentials = Credentials.read(config.secret_file, config.identity_dir, Part.FRONTEND)
    configs = config.of_models()
    all_routers = [Routers(each, model=model.name) for each, model in zip(configs, models, strict=True)]
    attaching = [
        Attaching(each.routers, credentials, routers) for each, routers in zip(configs, all_routers, strict=True)
    ]
    clients = Clients(config.api_keys_file, all_routers[0].tenants)
    routes = [
        ModelRoute(each, model, routers, clients.counted_by(routers.tenants))
        for each, model, routers in zip(configs, models, all_routers, strict=True)
    ]
    async with AsyncExitStack() as stack:
        metrics_address = await stack.enter_async_context(
            showing(config, lambda: _samples(all_routers), credentials.identity)
        )
        answers = await stack.enter_async_context(answering(config))
        endpoints = await stack.enter_async_context(open_endpoints(config, routes, instance=config.frontend_id))
        for routers in all_routers:
            routers.metrics_address, routers.changed = metrics_address, endpoints.changed
        answers.start(lambda: any(routers.readiness().is_ready for routers in all_routers))
        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(each.run(), name="routers") for each in attaching]
            serving += [tasks.create_task(_raise_when_broken(routers), name="guard") for routers in all_routers]
            await stop.wait()
            for routers in all_routers:
                routers.is_draining = True
            endpoints.changed()
            has_drained = await _drain(all_routers, config.drain_timeout_s)
            async with asyncio.TaskGroup() as leaving:
                for each in attaching:
                    leaving.create_task(each.leave(), name="goodbye")
            for task in serving:
                task.cancel()
    return has_drained


async def _drain(all_routers: Sequence[Routers], timeout_s: float) -> bool:
    """Let requests finish; end those that are left in the end. Returns whether none was left."""
    logger.info("draining %d requests", sum(routers.num_underway for routers in all_routers))
    try:
        async with asyncio.timeout(timeout_s):
            for routers in all_routers:
                await routers.idle()
    except TimeoutError:
        num_left = sum(routers.num_underway for routers in all_routers)
        logger.warning("%d requests did not finish within %g s", num_left, timeout_s)
        for routers in all_routers:
            routers.end_all()
        return False
    return True


async def _raise_when_broken(routers: Routers) -> None:
    await routers.failed


def _samples(all_routers: Sequence[Routers]) -> Iterator[Sample]:
    yield from (Sample(REQUESTS_WITHOUT_ROUTER, each.num_waiting, (each.model,)) for each in all_routers)
    yield from (Sample(REQUESTS_RESUMED, each.num_resumed, (each.model,)) for each in all_routers)
    yield from all_routers[0].kept.samples()


class Attaching:
    """Keeps a stream to each router."""

    def __init__(self, names: tuple[str, ...], credentials: Credentials, routers: Routers) -> None:
        """`names`: host:port each, ConfigError where one is not."""
        self._lookups = Lookups(names, "routers", self._note_addresses)
        self._credentials = credentials
        self._routers = routers
        self._found: dict[str, frozenset[str]] = {}  # addresses, by name
        self._kept: dict[str, asyncio.Task[None]] = {}  # by address
        self._tasks = asyncio.TaskGroup()
        self._problems: dict[str, str] = {}  # what was wrong last, by address
        self._is_leaving = False

    async def run(self) -> None:
        """Attach to all routers, and again whenever a stream is lost, until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._lookups.run(), name="names of routers")

    async def leave(self) -> None:
        """Tell routers that this process stops: they are not to take it for lost."""
        self._is_leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._routers.say_goodbye()

    def _note_addresses(self, name: str, addresses: frozenset[str]) -> None:
        self._found[name] = addresses
        for address in sorted(addresses - self._kept.keys()):
            self._kept[address] = self._tasks.create_task(self._keep(address), name=f"router {address}")

    async def _keep(self, address: str) -> None:
        """Keep a stream to a router for as long as a name leads to it."""
        backoff_s = MIN_BACKOFF_S
        while not self._is_leaving and any(address in addresses for addresses in self._found.values()):
            if await self._attach(address):
                backoff_s = MIN_BACKOFF_S
            self._lookups.again()  # a lost router may have a successor elsewhere
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        del self._kept[address]

    async def _attach(self, address: str) -> bool:
        """Attach to a router until the stream ends; return whether the router took this frontend."""
        link = RouterLink(address, self._routers)
        why = ""
        async with self._credentials.channel(address, Part.ROUTER) as channel:
            try:
                proof = await identify(channel, self._credentials.secret, ATTACH)
                call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(ATTACH)(metadata=proof)
                self._routers.attach(link)
                logger.info("attached to router %s", address)
                try:
                    why = await link.channel.run(call.read, call.write)
                finally:
                    call.cancel()
                    self._routers.lose(link)
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
        if not self._is_leaving:
            self._warn(address, why)
        return link.readiness is not None

    def _warn(self, address: str, problem: str) -> None:
        """Log why a router is not attached: as a warning the first time, and at level DEBUG while it stays the same."""
        level = logging.DEBUG if self._problems.get(address) == problem else logging.WARNING
        self._problems[address] = problem
        logger.log(level, "router %s: %s", address, problem)
