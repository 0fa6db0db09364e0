"""The life of a worker's process: attach, load, serve, drain, leave."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from pdserve.base.clock import MonotonicClock, new_incarnation
from pdserve.base.collector import freeze_objects
from pdserve.base.errors import DeviceError
from pdserve.base.files import name_process
from pdserve.base.ids import MAX_WORKER_TASKS, PROTOCOL_VERSION, Incarnation, Peer, WorkerId
from pdserve.base.processes import DEVICE_EXIT_STATUS, name_of_life
from pdserve.base.signals import drain_on_signals
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.executor.joining import gathering
from pdserve.executor.threads import Seat
from pdserve.grammar.compiler import Compiler
from pdserve.grammar.matching import Grammars
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.server import HandoffServicer, check_addresses, listening
from pdserve.kvtransfer.session import Introduction
from pdserve.kvtransfer.speed import Probes
from pdserve.net.certificates import Part
from pdserve.net.credentials import Connections, Credentials
from pdserve.net.health import answering
from pdserve.observe.metrics import Sample, connection_samples, span_samples
from pdserve.observe.metrics_server import showing
from pdserve.perfmodel.wire import write_cost
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.link import ROLE_NUMBERS, layout_to_proto
from pdserve.settings.config import WorkerConfig
from pdserve.worker.admission import Rules
from pdserve.worker.boot import Engine, build_engine, build_mover, check_network, open_model
from pdserve.worker.core import WorkerCore
from pdserve.worker.inbox import Inbox, Listener
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.kv_publisher import KvPublisher, publishing
from pdserve.worker.link import Links
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.messages import DrainAsked
from pdserve.worker.outbox import Carriers, Outbox
from pdserve.worker.reporting import Reporter, handoff_samples, load_samples, refusal_samples
from pdserve.worker.spans import TaskSpans
from pdserve.worker.warm_up import warm_up
from pdserve.worker.watchdog import DISMISSED_EXIT_STATUS, end_process

logger = logging.getLogger(__name__)

PROGRESS_STEP = 0.02  # share of the model between two reports of loading


@dataclass(frozen=True, slots=True)
class Worker:
    core: WorkerCore
    credentials: Credentials
    outbox: Outbox
    reporter: Reporter
    handoff_address: str

    def samples(self, engine: Engine, own_ports: Mapping[str, Connections]) -> Iterator[Sample]:
        model = engine.model_name
        yield from self.reporter.steps.samples(model, engine.scheduler.speculation.source)
        yield from load_samples(self.outbox.with_stalled(self.core.load()), engine.scheduler.cache, model)
        yield from handoff_samples(self.core)
        yield from refusal_samples(self.reporter.refused)
        yield from span_samples(self.outbox.spans.counts if self.outbox.spans else {})
        yield from connection_samples({**self.credentials.ports("handoff"), **own_ports})


@dataclass(frozen=True, slots=True)
class OwnRouter:
    """A router in a worker's process."""

    address: str = ""  # where it awaits the worker, over loopback and without TLS; empty: there is none
    closing_s: float = 0.0  # how long it may take to close its doors after the drain
    ports: Mapping[str, Connections] = field(default_factory=dict)  # counters of TLS connections, by the port's name


_NONE = OwnRouter()


async def serve(config: WorkerConfig, seat: Seat | None = None, own: OwnRouter = _NONE) -> None:
    """Run a worker until it has drained: after a signal to stop, when a router asks for it, or by its own decision."""
    check_addresses(config)
    check_network(config)
    config, incarnation = _named(config)
    credentials = Credentials.read(config.secret_file, config.identity_dir, Part.WORKER)
    peer = Peer(WorkerId(config.worker_id), incarnation)
    register = _registration(config, incarnation)
    inbox, clock, loop = Inbox(), MonotonicClock(), asyncio.get_running_loop()
    async with answering(config) as health, AsyncExitStack() as closing, asyncio.TaskGroup() as group:
        listener = Listener(inbox, group)
        end = partial(end_process, DISMISSED_EXIT_STATUS)
        links = Links(config.routers, credentials, register, listener, end, own.address)
        whole = asyncio.Event()
        linking = group.create_task(_link(links, config.nnodes, whole), name="links")
        checkpoint = await asyncio.to_thread(open_model, config)
        drain = partial(inbox.put, DrainAsked(is_final=True))
        joined = gathering(config, peer, checkpoint, credentials, drain)
        listener.open_grammars(_grammars(checkpoint, inbox))
        progress = _progress(links, register)
        nodes = await closing.enter_async_context(joined)
        whole.set()
        with ending_on_broken_device():
            secret = credentials.secret
            engine = await asyncio.to_thread(build_engine, config, checkpoint, secret, progress, seat, nodes)
        closing.push_async_callback(asyncio.to_thread, engine.executor.close)
        _describe(engine, register)
        if not config.test_step_s:
            await _try_steps(engine, register)

        def reporter(publisher: KvPublisher | None) -> Reporter:
            return Reporter(links, clock, KvFeed(engine.scheduler.cache, links, publisher))

        with drain_on_signals(loop, drain, config.drain_timeout_s + own.closing_s):
            async with (
                publishing(config, register) as publisher,
                assemble(config, engine, peer, credentials, listener, reporter(publisher)) as worker,
                showing(config, partial(worker.samples, engine, own.ports), credentials.identity) as metrics_address,
            ):
                freeze_objects()
                register.metrics_address = metrics_address
                register.ready = True
                register.load_progress = 1.0
                register.handoff_address = worker.handoff_address
                # First: from `ready` on routers place here, also while they know no load.
                worker.outbox.beat(worker.core.load(), 0)
                links.update()
                engine.executor.take_memory()
                health.start(lambda: bool(links.attached) and not worker.core.load().draining)
                logger.info("ready: %s, %d pages", engine.model_name, engine.scheduler.cache.pool.num_pages)
                await WorkerLoop(
                    worker.core, engine.executor.start, inbox, worker.outbox, clock, config.stalled_step_s
                ).run()
                links.finish()
                await linking
                listener.close()
    logger.info("drained")


def _named(config: WorkerConfig) -> tuple[WorkerConfig, Incarnation]:
    """Name this process: where its container's end is seen, and to routers."""
    incarnation = Incarnation(config.incarnation) if config.incarnation else new_incarnation()
    name_process(config.termination_message_file, incarnation)
    if config.nnodes > 1 and config.launch_id:
        config = config.model_copy(update={"worker_id": name_of_life(config.worker_id, incarnation)})
    return config, incarnation


async def _try_steps(engine: Engine, register: link.Register) -> None:
    """Compute the steps after which all is compiled; routers are told what they cost."""
    scheduler = engine.scheduler
    with ending_on_broken_device():
        trial = await warm_up(scheduler.limits, scheduler.cache, engine.vocab_size, engine.executor.start)
    for each in trial:
        write_cost(each.step, each.elapsed_s, register.trial_steps.add())
        scheduler.speculation.observe(each.step, each.elapsed_s)


async def _link(links: Links, nnodes: int, whole: asyncio.Event) -> None:
    """Attach once this process proves the end of the one before: on all machines, whose ranks have joined by then."""
    if nnodes > 1:
        await whole.wait()
    await links.run()


@contextmanager
def ending_on_broken_device() -> Iterator[None]:
    """End this process if the device breaks before the worker's loop is there to see it."""
    try:
        yield
    except DeviceError as error:
        end_process(DEVICE_EXIT_STATUS, f"the device is broken: {error}")
        raise


@asynccontextmanager
async def assemble(
    config: WorkerConfig, engine: Engine, peer: Peer, credentials: Credentials, listener: Listener, reporter: Reporter
) -> AsyncIterator[Worker]:
    """Set up the core and both doors, and take them down again."""
    loop = asyncio.get_running_loop()

    def on_stopped(message: ReceiverMessage) -> None:
        loop.call_soon_threadsafe(listener.put, message)

    # Not in this thread: what ranks of other machines answer comes through the loop.
    mover = await asyncio.to_thread(build_mover, config, peer, engine.executor, on_stopped, credentials.secret)
    listener.guard(mover)
    rules = rules_of(config, len(mover.turns))
    core = WorkerCore(engine.scheduler, engine.vocab_size, engine.layout.page_bytes, secrets.token_bytes(32), rules)
    me = Introduction(peer, engine.layout)
    servicer = HandoffServicer(me, mover, listener, reporter.refused)
    try:
        async with (
            asyncio.TaskGroup() as tasks,
            _tracing(config, core) as spans,
            listening(servicer, config, credentials, reporter.refuse) as address,
        ):
            probes = Probes(mover.probe, reporter.report_pair, tasks, config.slow_pair_bytes_per_s)
            client = HandoffClient(me, mover, credentials, listener, tasks, reporter.refused)
            carriers = Carriers(client, servicer, mover, probes)
            outbox = Outbox(carriers, reporter, listener, tasks, MonotonicClock(), spans)
            yield Worker(core, credentials, outbox, reporter, address)
            await carriers.close()
    finally:
        await asyncio.to_thread(mover.close)


def rules_of(config: WorkerConfig, num_parts: int) -> Rules:
    has_stages = config.pipeline_parallel_size > 1
    return Rules(
        max_tasks=MAX_WORKER_TASKS,
        checks_digests=config.digests == "always",
        max_quarantined_share=config.max_quarantined_share,
        lease_s=config.lease_s,
        role=config.role,
        step_tokens=config.step_tokens,
        fills_steps_ahead=config.device == "cuda" or has_stages,
        num_parts=num_parts,
        has_stages=has_stages,
    )


@asynccontextmanager
async def _tracing(config: WorkerConfig, core: WorkerCore) -> AsyncIterator[TaskSpans | None]:
    """Send the spans of traced tasks for the length of the block, if there is a collector."""
    if config.otlp_traces_endpoint is None:
        yield None
        return
    from pdserve.observe.tracing import SpanExport  # noqa: PLC0415 - takes long to import

    export = SpanExport(config.otlp_traces_endpoint, "pdserve-worker", config.worker_id)
    try:
        yield TaskSpans(export, core.has_task)
    finally:
        await export.close()


def _progress(links: Links, register: link.Register) -> Callable[[float], None]:
    """Return what takes the share of a model that is loaded, from any thread, and reports it in whole steps."""
    loop, reported = asyncio.get_running_loop(), 0.0

    def report(share: float) -> None:
        register.load_progress = min(share, 0.99)
        links.update()

    def note(share: float) -> None:
        nonlocal reported
        if share - reported >= PROGRESS_STEP:
            reported = share
            loop.call_soon_threadsafe(report, share)

    return note


def _registration(config: WorkerConfig, incarnation: Incarnation) -> link.Register:
    return link.Register(
        worker_id=config.worker_id,
        incarnation=incarnation,
        role=ROLE_NUMBERS[config.role],
        protocol_version=PROTOCOL_VERSION,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens[config.role],
        launch_id=config.launch_id,
    )


def _grammars(checkpoint: Checkpoint, inbox: Inbox) -> Grammars:
    """Return the grammars of a model's answers; sequences that waited for one run once it is compiled."""
    loop = asyncio.get_running_loop()

    def compiler() -> Compiler:
        tokenizer = checkpoint.tokenizer()
        return Compiler(tokenizer.to_json(), checkpoint.ends(tokenizer))

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(inbox.wake)

    return Grammars(compiler, wake)


def _describe(engine: Engine, register: link.Register) -> None:
    register.model = engine.model_name
    register.device = engine.executor.device_name
    register.num_pages = engine.scheduler.cache.pool.num_pages
    register.max_model_len = engine.scheduler.limits.max_model_len
    register.most_step_tokens = engine.scheduler.limits.max_num_batched_tokens
    register.layout.CopyFrom(layout_to_proto(engine.layout))
