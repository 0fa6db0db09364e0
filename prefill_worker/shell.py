"""Around the outgoing door: streams to receivers, copies into their pages, and probes of the ways to them."""

import asyncio
from dataclasses import dataclass

from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.doors import (
    CancelCopies,
    Connect,
    Copy,
    OutgoingCommand,
    OutgoingEvent,
    Probe,
    ReceiverSaid,
    Sink,
    ToReceiver,
)
from pdserve.kvtransfer.mover import Mover, OnStopped
from pdserve.kvtransfer.sender import CopyStopped
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.prefill_worker.probes import Probes


def report_copies(sink: Sink[OutgoingEvent]) -> OnStopped:
    """Return what takes ends of copies from the mover's thread to the worker's loop."""
    loop = asyncio.get_running_loop()

    def report(peer: Peer, key: HandoffKey, stopped: CopyStopped) -> None:
        loop.call_soon_threadsafe(sink.put, ReceiverSaid(peer, key, stopped))

    return report


@dataclass(frozen=True, slots=True)
class OutgoingShell:
    """Carries out what the outgoing door decides."""

    client: HandoffClient
    mover: Mover
    probes: Probes

    def perform(self, command: OutgoingCommand) -> None:
        match command:
            case Connect(peer, address):
                self.client.connect(peer, address)
            case Copy(peer, key, src, dst):
                self.mover.write(peer, key, src, dst)
            case CancelCopies(peer, key):
                self.mover.cancel(peer, key)
            case ToReceiver(peer, key, message):
                self.client.send(peer, key, message)
            case Probe(peer):
                self.probes.start(peer)

    def forget(self, peer: Peer) -> None:
        """Drop what there is for a process that has ended."""
        self.client.forget(peer)
        self.mover.forget(peer)
        self.probes.forget(peer)

    async def close(self) -> None:
        self.probes.close()
        await self.client.close()
