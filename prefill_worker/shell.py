"""Around the outgoing door: streams to receivers, copies into their pages, and probes of the ways to them."""

import asyncio
from dataclasses import dataclass

from pdserve.kvtransfer import sender
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.copies import CopyId, CopyStopped
from pdserve.kvtransfer.doors import (
    CancelCopies,
    Connect,
    Copy,
    Forget,
    OutgoingCommand,
    OutgoingEvent,
    Probe,
    ReceiverSaid,
    Sink,
    ToReceiver,
)
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.prefill_worker.probes import Probes


class Copies:
    """Which copy belongs to which hand-off."""

    def __init__(self, sink: Sink[OutgoingEvent]) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._owner: dict[CopyId, tuple[Peer, HandoffKey]] = {}

    def started(self, copy_id: CopyId, peer: Peer, key: HandoffKey) -> None:
        self._owner[copy_id] = (peer, key)

    def stopped(self, stopped: CopyStopped) -> None:
        """Report a copy's end; called in the mover's thread."""
        self._loop.call_soon_threadsafe(self._report, stopped)

    def _report(self, stopped: CopyStopped) -> None:
        peer, key = self._owner.pop(stopped.copy_id)
        event = sender.CopyStopped(stopped.digests, stopped.reason, stopped.in_doubt)
        self._sink.put(ReceiverSaid(peer, key, event))


@dataclass(frozen=True, slots=True)
class OutgoingShell:
    """Carries out what the outgoing door decides."""

    client: HandoffClient
    mover: Mover
    copies: Copies
    probes: Probes

    def perform(self, command: OutgoingCommand) -> None:
        match command:
            case Connect() | ToReceiver():
                self.client.handle(command)
            case Copy(peer, key, src, dst):
                self.copies.started(self.mover.write(peer, key, src, dst), peer, key)
            case CancelCopies(peer, key):
                self.mover.cancel(peer, key)
            case Probe(peer):
                self.probes.start(peer)
            case Forget(peer):
                self.client.handle(command)
                self.mover.forget(peer)
                self.probes.forget(peer)

    async def close(self) -> None:
        self.probes.close()
        await self.client.close()
