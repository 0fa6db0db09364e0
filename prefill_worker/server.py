"""The prefill worker's process: engine, mover and streams around its core."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from pdserve.clock import Clock, MonotonicClock
from pdserve.config import PrefillWorkerConfig
from pdserve.engine.step import StepPlan, StepResult
from pdserve.errors import Refusal
from pdserve.ids import MAX_WORKER_TASKS
from pdserve.kvtransfer import peers, sender
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.copies import CopyId, CopyStopped
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.peers import FromReceivers, Party, PeerMessage
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.prefill_worker.core import PrefillCore
from pdserve.prefill_worker.events import (
    CancelCopies,
    Command,
    Connect,
    Copy,
    Event,
    Forget,
    FromPeer,
    PeerAttached,
    PeerLost,
    ToPeer,
)
from pdserve.prefill_worker.pairs import Pairs
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.boot import Engine
from pdserve.worker.ending import end_hung
from pdserve.worker.loop import Inbox
from pdserve.worker.messages import Failed, Load, Progress, Report, Tokens
from pdserve.worker.movers import build_mover, check_network, kv_region
from pdserve.worker.process import Identity, Parts, serve_worker
from pdserve.worker.pulse import Watch
from pdserve.worker.reporting import Reporter

HUNG_MOVER_S = 60.0  # its thread is a millisecond from its next look, but for the time a library's call takes


async def serve(config: PrefillWorkerConfig) -> None:
    """Run a prefill worker until it has drained."""
    check_network(config)
    await serve_worker(config, link.ROLE_PREFILL, partial(assemble, config))


@asynccontextmanager
async def assemble(
    config: PrefillWorkerConfig, engine: Engine, identity: Identity, inbox: Inbox[Event], reporter: Reporter
) -> AsyncIterator[Parts[Event, Command]]:
    """Set up what a prefill worker consists of, and take it down again."""
    copies = Copies(inbox)
    mover = build_mover(config, identity.peer, kv_region(engine), copies.stopped, identity.secret)
    share = config.max_quarantined_share
    core = PrefillCore(engine.scheduler, engine.vocab_size, engine.layout.page_bytes, MAX_WORKER_TASKS, share)

    me = Party(identity.peer, engine.layout, mover)
    try:
        async with asyncio.TaskGroup() as tasks:
            pairs = Pairs(mover, reporter, tasks, config.slow_pair_bytes_per_s)
            client = HandoffClient(me, identity.secret, Receivers(inbox, pairs), tasks, reporter.refused)
            outbox = PrefillOutbox(client, Movement(mover, copies, pairs), reporter, MonotonicClock())
            yield Parts(core, outbox, mover)
            pairs.close()
            await client.close()
    finally:
        await asyncio.to_thread(mover.close)


class Receivers:
    """Tells the core what decode workers say, and what becomes of the streams to them."""

    def __init__(self, inbox: Inbox[Event], pairs: Pairs) -> None:
        self._inbox = inbox
        self._pairs = pairs

    def put(self, report: FromReceivers) -> None:
        self._inbox.put(_event(report))
        if isinstance(report, peers.PeerAttached):
            self._pairs.attached(report.peer)

    async def offer(self, report: FromReceivers) -> None:
        await self._inbox.offer(_event(report))


def _event(report: FromReceivers) -> Event:
    match report:
        case peers.PeerAttached(peer):
            return PeerAttached(peer)
        case PeerMessage(peer, key, event):
            return FromPeer(peer, key, event)
        case peers.PeerLost(peer, reason):
            return PeerLost(peer, reason)


class Copies:
    """Which copy belongs to which hand-off."""

    def __init__(self, inbox: Inbox[Event]) -> None:
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._owner: dict[CopyId, tuple[Peer, HandoffKey]] = {}

    def started(self, copy_id: CopyId, peer: Peer, key: HandoffKey) -> None:
        self._owner[copy_id] = (peer, key)

    def stopped(self, stopped: CopyStopped) -> None:
        """Hear of a copy's end, in the mover's thread."""
        self._loop.call_soon_threadsafe(self._settle, stopped)

    def _settle(self, stopped: CopyStopped) -> None:
        peer, key = self._owner.pop(stopped.copy_id)
        self._inbox.put(FromPeer(peer, key, sender.CopyStopped(stopped.digests, stopped.reason, stopped.in_doubt)))


@dataclass(frozen=True, slots=True)
class Movement:
    """What moves pages, and what is kept of it."""

    mover: Mover
    copies: Copies
    pairs: Pairs


class PrefillOutbox:
    """Carries out what the core decides."""

    def __init__(self, client: HandoffClient, movement: Movement, reporter: Reporter, clock: Clock) -> None:
        self._client = client
        self._movement = movement
        self._reporter = reporter
        self._clock = clock
        self._watch = Watch(HUNG_MOVER_S, clock.now_s())

    def perform(self, commands: Sequence[Command], step: tuple[StepPlan, StepResult] | None) -> None:
        reports: list[Report] = []
        for command in commands:
            match command:
                case Tokens() | Progress() | Failed():
                    reports.append(command)
                case Connect(peer, address):
                    self._client.connect(peer, address)
                case Copy(peer, key, src, dst):
                    self._movement.copies.started(self._movement.mover.write(peer, key, src, dst), peer, key)
                case CancelCopies(peer, key):
                    self._movement.mover.cancel(peer, key)
                case ToPeer(peer, key, message):
                    self._client.send(peer, key, message)
                case Forget(peer):
                    self._client.forget(peer)
                    self._movement.mover.forget(peer)
                    self._movement.pairs.forget(peer)
        self._reporter.send(reports, step)

    def beat(self, load: Load, num_steps: int) -> None:
        if not self._watch.look(self._movement.mover.turn, self._clock.now_s()):
            end_hung("the mover's thread")
        self._client.beat()
        self._reporter.beat(self._with_stalled(load), num_steps)

    def refresh(self, load: Callable[[], Load], num_steps: int, *, at_once: bool) -> None:
        self._reporter.refresh(lambda: self._with_stalled(load()), num_steps, at_once=at_once)

    def refuse(self, refusal: Refusal) -> None:
        self._reporter.refuse(refusal)

    def _with_stalled(self, load: Load) -> Load:
        return replace(load, num_stalled_peers=self._movement.mover.num_stalled)
