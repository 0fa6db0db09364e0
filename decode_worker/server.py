"""The decode worker's process: engine, memory and streams around its core."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
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
from pdserve.errors import Refusal
from pdserve.kvtransfer import peers
from pdserve.kvtransfer.backends.unread import until_read
from pdserve.kvtransfer.mover import Region
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.session import DigestPolicy
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from pdserve.rpc import INTERNAL_MESSAGE_BYTES, RequireSecret, server_options
from pdserve.worker.boot import Engine
from pdserve.worker.loop import Inbox
from pdserve.worker.movers import build_mover
from pdserve.worker.process import Identity, Parts, serve_worker
from pdserve.worker.regions import kv_region
from pdserve.worker.reporting import Reporter
from pdserve.worker.words import Failed, Load, PeerGone, Progress, Report, Tokens

STOP_GRACE_S = 1.0


async def serve(config: DecodeWorkerConfig) -> None:
    """Run a decode worker until it has drained."""

    @asynccontextmanager
    async def assemble(
        engine: Engine, identity: Identity, inbox: Inbox[Event], reporter: Reporter
    ) -> AsyncIterator[Parts[Event, Command]]:
        """Set up what a decode worker consists of, and take it down again."""
        region = kv_region(engine)
        listen = (config.handoff_host, _advertised(config, 0).rpartition(":")[0])
        mover = build_mover(config, identity.peer, region, lambda _: None, listen)  # written to, writes nothing
        rules = Rules(
            digests=DigestPolicy(config.digests),
            max_quarantined_share=config.max_quarantined_share,
            lease_s=config.lease_s,
        )
        core = DecodeCore(engine.scheduler, engine.vocab_size, secrets.token_bytes(32), rules)

        async def hear(news: peers.FromSenders) -> None:
            if isinstance(news, peers.PeerGone):
                await until_read()
            await inbox.offer(_event(news))

        servicer = HandoffServicer(peers.Party(identity.peer, engine.layout, mover), hear, reporter.refused)
        server = grpc.aio.server(
            interceptors=[RequireSecret(identity.secret, lambda: reporter.refuse(Refusal.SECRET))],
            options=server_options(INTERNAL_MESSAGE_BYTES),
        )
        add_HandoffServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port(f"{config.handoff_host}:{config.handoff_port}")
        await server.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                checks = Checks(region, inbox, tasks)
                yield Parts(core, DecodeOutbox(servicer, checks, reporter), _advertised(config, port))
        finally:
            await server.stop(STOP_GRACE_S)
            await asyncio.to_thread(mover.close)

    await serve_worker(config, link.ROLE_DECODE, assemble)


def _advertised(config: DecodeWorkerConfig, port: int) -> str:
    """Return where prefill workers reach this one."""
    told = config.handoff_advertise or config.handoff_host
    return told if told.rpartition(":")[2].isdigit() and ":" in told else f"{told}:{port}"


def _event(news: peers.FromSenders) -> Event:
    match news:
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

    def refuse(self, refusal: Refusal) -> None:
        self._reporter.refuse(refusal)
