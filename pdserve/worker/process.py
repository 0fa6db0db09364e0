"""The life of a worker process, the same for both kinds: attach, load, serve, drain, leave."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

from pdserve.clock import Clock, MonotonicClock
from pdserve.config import WorkerConfig
from pdserve.engine.runner import run
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import ProtocolError
from pdserve.files import ReadyFile
from pdserve.ids import Incarnation, WorkerId
from pdserve.incarnation import new_incarnation
from pdserve.kvlayout_wire import layout_to_proto
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.session import Peer
from pdserve.proto.v1 import link_pb2 as link
from pdserve.rpc import PROTOCOL_VERSION, read_secret
from pdserve.signals import drain_on_signals
from pdserve.telemetry import configure_logging
from pdserve.worker import wire
from pdserve.worker.boot import Engine, build_engine, open_model
from pdserve.worker.device_name import device_name
from pdserve.worker.ending import end_dismissed
from pdserve.worker.isolating import Isolating
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.kv_publisher import KvPublisher, publishing
from pdserve.worker.link import FromRouter, Links
from pdserve.worker.loop import Core, Inbox, Outbox, WorkerLoop
from pdserve.worker.messages import Cancelled, DrainAsked, PeerGone, Placed, RouterLost
from pdserve.worker.reporting import Reporter
from pdserve.worker.threads import EngineThread

logger = logging.getLogger(__name__)

PROGRESS_STEP = 0.02  # share of the model between two reports of loading

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")
FromRouterEvent = Placed | Cancelled | DrainAsked | RouterLost | PeerGone


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is."""

    peer: Peer
    role: "link.Role.ValueType"
    secret: bytes


@dataclass(frozen=True, slots=True)
class Parts(Generic[EventT, CommandT]):
    """What makes one kind of worker."""

    core: Core[EventT, CommandT]
    outbox: Outbox[CommandT]
    mover: Mover
    handoff_address: str = ""


Assemble = Callable[
    [Engine, Identity, Inbox[EventT], Reporter],
    AbstractAsyncContextManager[Parts[EventT, CommandT]],
]


async def serve_worker(config: WorkerConfig, role: "link.Role.ValueType", assemble: Assemble[EventT, CommandT]) -> None:
    """Run a worker until it has drained: after SIGTERM or SIGINT, at a router's word, or by its own decision."""
    configure_logging(config.worker_id, config.log_level)
    incarnation = Incarnation(config.incarnation) if config.incarnation else new_incarnation()
    identity = Identity(Peer(WorkerId(config.worker_id), incarnation), role, read_secret(config.secret_file))
    inbox: Inbox[EventT] = Inbox()
    ready = ReadyFile(config.ready_file)
    register = link.Register(
        worker_id=config.worker_id,
        incarnation=incarnation,
        role=role,
        protocol_version=PROTOCOL_VERSION,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        host=socket.gethostname(),
    )
    clock = MonotonicClock()
    async with EngineThread() as thread, asyncio.TaskGroup() as group:
        ear = Ear(inbox, clock, group)
        links = Links(config.routers, identity.secret, register, ear, end_dismissed)
        linking = group.create_task(links.run(), name="links")
        engine = await thread.call(_load, config, identity, _Progress(links, register))
        _describe(engine, config.device, register)

        steps = Isolating(partial(run, engine.runner))

        def start_step(plan: StepPlan) -> asyncio.Future[StepResult]:
            return thread.call(steps.run, plan)

        def drain() -> None:
            ready.withdraw()
            inbox.put(cast(EventT, DrainAsked()))

        def reporter(publisher: KvPublisher | None) -> Reporter:
            feed = KvFeed(engine.scheduler.cache, links, publisher)
            return Reporter(links, clock, feed, on_draining=ready.withdraw)

        with drain_on_signals(asyncio.get_running_loop(), drain, config.drain_timeout_s), ready:
            async with (
                publishing(config, identity.secret, register) as publisher,
                assemble(engine, identity, inbox, reporter(publisher)) as parts,
            ):
                ear.guard(parts.mover)
                register.ready = True
                register.load_progress = 1.0
                register.handoff_address = parts.handoff_address
                parts.outbox.beat(parts.core.load(), 0)  # before anybody counts on its pages
                links.update(register)
                ready.write(json.dumps({"handoff": parts.handoff_address, "pid": os.getpid()}))
                logger.info("ready: %s, %d pages", engine.model_name, engine.scheduler.cache.pool.num_pages)
                loop = WorkerLoop(parts.core, start_step, inbox, parts.outbox, clock, config.stalled_step_s)
                await loop.run()
                links.finish()
                await linking
                ear.close()
    logger.info("drained")


class Ear(Generic[EventT]):
    """Passes on what routers say, in its order, but the ends of processes.

    What a process had sent may still be on its way into our pages: its end is passed on once that can reach none of
    them, which a writer that is frozen may put off, and which keeps nothing else waiting.
    """

    def __init__(self, inbox: Inbox[EventT], clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self._inbox = inbox
        self._clock = clock
        self._tasks = tasks
        self._ends: set[asyncio.Task[None]] = set()
        self._mover: Mover | None = None

    def guard(self, mover: Mover) -> None:
        """Have a mover's pages be safe from a process before its end is passed on. None must be granted before this."""
        self._mover = mover

    def put(self, report: FromRouter | RouterLost) -> None:
        """Take the end of a stream."""
        if isinstance(report, RouterLost):
            self._inbox.put(cast(EventT, report))

    async def offer(self, report: FromRouter | RouterLost) -> None:
        """Take one message; waits while the core has too much to do."""
        event = report if isinstance(report, RouterLost) else _event(report, self._clock.now_s())
        if isinstance(event, PeerGone):
            end = self._tasks.create_task(self._pass_on_when_settled(event), name=f"end of {event.peer.worker_id}")
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
        elif event is not None:
            await self._pass_on(event)

    def close(self) -> None:
        """Pass nothing on any more."""
        for end in self._ends:
            end.cancel()

    async def _pass_on_when_settled(self, event: PeerGone) -> None:
        if self._mover is not None:
            await self._mover.settle(event.peer)
        await self._pass_on(event)

    async def _pass_on(self, event: FromRouterEvent) -> None:
        await self._inbox.offer(cast(EventT, event))  # what routers say is among every kind of worker's events


class _Progress:
    """Tells routers how far a model's loading has come."""

    def __init__(self, links: Links, register: link.Register) -> None:
        self._links = links
        self._register = register
        self._loop = asyncio.get_running_loop()
        self._told = 0.0

    def tell(self, share: float) -> None:
        """Tell it in whole steps; from any thread."""
        if share - self._told >= PROGRESS_STEP:
            self._told = share
            self._loop.call_soon_threadsafe(self._report, share)

    def _report(self, share: float) -> None:
        self._register.load_progress = min(share, 0.99)
        self._links.update(self._register)


def _load(config: WorkerConfig, identity: Identity, progress: _Progress) -> Engine:
    return build_engine(config, open_model(config), identity.secret, progress.tell)


def _describe(engine: Engine, device: str, register: link.Register) -> None:
    register.model = engine.model_name
    register.device = device_name(device)
    register.num_pages = engine.scheduler.cache.pool.num_pages
    register.max_model_len = engine.scheduler.limits.max_model_len
    register.layout.CopyFrom(layout_to_proto(engine.layout))


def _event(news: FromRouter, now_s: float) -> FromRouterEvent | None:
    if news.message.WhichOneof("message") == "process_gone":
        return PeerGone(wire.gone_process(news.message.process_gone))
    try:
        return wire.command(news.message, news.router, now_s)
    except ProtocolError as error:
        logger.warning("router %d: refused: %s", news.router, error)
        return None
