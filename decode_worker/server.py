"""The decode worker's process: engine, memory and streams around its core."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from pdserve.config import DecodeWorkerConfig
from pdserve.decode_worker.core import DecodeCore
from pdserve.decode_worker.events import (
    CheckDigests,
    Command,
    DigestsChecked,
    Event,
    Forget,
    FromPeer,
    PeerAlive,
    PeerAttached,
    PeerLost,
    ToPeer,
)
from pdserve.decode_worker.rules import Rules
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import ConfigError, Refusal
from pdserve.ids import MAX_WORKER_TASKS
from pdserve.kvtransfer import peers
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.session import DigestPolicy
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from pdserve.rpc import (
    INTERNAL_MESSAGE_BYTES,
    RequireSecret,
    join_address,
    listen,
    server_options,
    split_address,
)
from pdserve.worker.boot import Engine
from pdserve.worker.loop import Inbox
from pdserve.worker.messages import Failed, Load, PeerGone, Progress, Report, Tokens
from pdserve.worker.movers import build_mover, check_network, kv_region
from pdserve.worker.process import Identity, Parts, serve_worker
from pdserve.worker.reporting import Reporter

STOP_GRACE_S = 1.0
EVERYWHERE = ("", "0.0.0.0", "::")  # hosts that nobody can dial


async def serve(config: DecodeWorkerConfig) -> None:
    """Run a decode worker until it has drained."""
    check_addresses(config)
    check_network(config)

    @asynccontextmanager
    async def assemble(
        engine: Engine, identity: Identity, inbox: Inbox[Event], reporter: Reporter
    ) -> AsyncIterator[Parts[Event, Command]]:
        """Set up what a decode worker consists of, and take it down again."""
        region = kv_region(engine)
        listening = (config.handoff_host, split_address(config.handoff_advertise or "")[0])
        # Written to, it writes nothing.
        mover = build_mover(config, identity.peer, region, lambda _: None, identity.secret, listening)
        rules = Rules(
            max_tasks=MAX_WORKER_TASKS,
            digests=DigestPolicy(config.digests),
            max_quarantined_share=config.max_quarantined_share,
            lease_s=config.lease_s,
        )
        core = DecodeCore(engine.scheduler, engine.vocab_size, secrets.token_bytes(32), rules)
        me = peers.Party(identity.peer, engine.layout, mover)
        server = grpc.aio.server(
            interceptors=[RequireSecret(identity.secret, lambda: reporter.refuse(Refusal.SECRET))],
            options=server_options(INTERNAL_MESSAGE_BYTES),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                senders = Senders(inbox, mover, tasks)
                servicer = HandoffServicer(me, senders, reporter.refused)
                add_HandoffServiceServicer_to_server(servicer, server)
                bound = listen(server, config.handoff_host, config.handoff_port, "handoff_port")
                await server.start()
                checks = Checks(region, inbox, tasks)
                yield Parts(core, DecodeOutbox(servicer, checks, reporter), mover, advertised(config, bound))
                servicer.close()
                senders.close()
        finally:
            await server.stop(STOP_GRACE_S)
            await asyncio.to_thread(mover.close)

    await serve_worker(config, link.ROLE_DECODE, assemble)


def check_addresses(config: DecodeWorkerConfig) -> None:
    """Raise ConfigError where prefill workers could not be told where to find this one."""
    told = config.handoff_advertise
    if told is None and config.handoff_host in EVERYWHERE:
        raise ConfigError(f"handoff_advertise: is required where handoff_host is {config.handoff_host!r}")
    host, port = split_address(told or config.handoff_host)
    if not host or (port and not port.isdigit()):
        raise ConfigError(f"handoff_advertise: {told!r} is neither host nor host:port")


def advertised(config: DecodeWorkerConfig, bound: str) -> str:
    """Return where prefill workers reach this one, which listens on the address `bound`."""
    if config.handoff_advertise is None:
        return bound
    host, port = split_address(config.handoff_advertise)
    return join_address(host, int(port or split_address(bound)[1]))


class Senders:
    """Tells the core what prefill workers say, and what becomes of the streams from them.

    What a process had sent may still be on its way into our pages: the core is told that a process has ended once it
    can reach none of them, which keeps nothing else waiting.
    """

    def __init__(self, inbox: Inbox[Event], mover: Mover, tasks: asyncio.TaskGroup) -> None:
        self._inbox = inbox
        self._mover = mover
        self._tasks = tasks
        self._settling: set[asyncio.Task[None]] = set()

    def put(self, report: peers.FromSenders) -> None:
        if isinstance(report, peers.PeerGone):
            settling = self._tasks.create_task(self._settle(report), name=f"end of {report.peer.worker_id}")
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
        else:
            self._inbox.put(_event(report))

    async def offer(self, report: peers.FromSenders) -> None:
        await self._inbox.offer(_event(report))

    def close(self) -> None:
        """Report no more ends of processes."""
        for settling in self._settling:
            settling.cancel()

    async def _settle(self, gone: peers.PeerGone) -> None:
        await self._mover.settle(gone.peer)
        await self._inbox.offer(_event(gone))


def _event(report: peers.FromSenders) -> Event:
    match report:
        case peers.PeerAttached(peer):
            return PeerAttached(peer)
        case peers.PeerAlive(peer):
            return PeerAlive(peer)
        case peers.PeerMessage(peer, key, event):
            return FromPeer(peer, key, event)
        case peers.PeerLost(peer, reason):
            return PeerLost(peer, reason)
        case peers.PeerGone(peer):
            return PeerGone(peer)


class Checks:
    """Digest checks under way, each in a thread."""

    def __init__(self, region: Region, inbox: Inbox[Event], tasks: asyncio.TaskGroup) -> None:
        self._region = region
        self._inbox = inbox
        self._tasks = tasks

    def start(self, command: CheckDigests) -> None:
        self._tasks.create_task(self._check(command), name="digests")

    async def _check(self, command: CheckDigests) -> None:
        mismatch = await asyncio.to_thread(self._region.first_mismatch, command.pages, command.digests)
        self._inbox.put(DigestsChecked(command.key, mismatch))


class DecodeOutbox:
    """Carries out what the core decides."""

    def __init__(self, servicer: HandoffServicer, checks: Checks, reporter: Reporter) -> None:
        self._servicer = servicer
        self._checks = checks
        self._reporter = reporter

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        reports: list[Report] = []
        for command in commands:
            match command:
                case Tokens() | Progress() | Failed():
                    reports.append(command)
                case ToPeer(peer, key, message):
                    self._servicer.send(peer, key, message)
                case CheckDigests():
                    self._checks.start(command)
                case Forget(peer):
                    self._servicer.forget(peer)
        self._reporter.send(reports, step)

    def beat(self, load: Load, num_steps: int) -> None:
        self._reporter.beat(load, num_steps)

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        self._reporter.refresh(load, num_steps, at_once=at_once)

    def refuse(self, refusal: Refusal) -> None:
        self._reporter.refuse(refusal)
