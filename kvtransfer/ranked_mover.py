"""The movers of a worker whose ranks have memory of their own, as one.

Invariant: each rank's mover writes its part of a copy, and the end of each part is reported once, with its number.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from pdserve.base.clock import Clock
from pdserve.base.errors import InvariantError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer.backends.backend import Backend
from pdserve.kvtransfer.conversion import Conversion
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import decode_ranks, encode_ranks, first_difference
from pdserve.kvtransfer.routes import Share, check_shares, whole_of
from pdserve.kvtransfer.session import of_parts
from pdserve.kvtransfer.speed import PairSpeed, until_read
from pdserve.protocol.page_tables import Pages


class RankedMover:
    """See `Mover`, whose methods these are. Each rank has an agent of the library, with its own memory alone."""

    def __init__(self, backends: Sequence[Backend], on_stopped: OnStopped, clock: Clock | None = None) -> None:
        """backends: of each rank, in their order."""
        tells = [partial(_tell, on_stopped, part) for part in range(len(backends))]
        self._movers = tuple([Mover(*each, clock) for each in zip(backends, tells, strict=True)])
        self._shares = tuple(map(_share_of, backends))

    @property
    def name(self) -> str:
        return self._movers[0].name

    @property
    def num_stalled(self) -> int:
        return len(frozenset[Peer]().union(*[mover.stalled for mover in self._movers]))

    @property
    def turns(self) -> tuple[int | None, ...]:
        return tuple([mover.turn for mover in self._movers])

    def describe(self) -> bytes:
        described = [mover.description for mover in self._movers]
        return encode_ranks(list(zip(self._shares, described, strict=True)))

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        return first_difference(of_parts([mover.region.digests(pages) for mover in self._movers]), digests)

    def attach(self, peer: Peer, description: bytes, conversion: Conversion | None = None) -> None:
        """Prepare writes of each rank to those of the peer's ranks that hold a part of what it holds; blocks."""
        if conversion is not None:
            raise InvariantError("pages in parts are converted for nobody: their digests name no type")
        check_shares([share for share, _ in decode_ranks(description)], whole_of(self._shares))
        for mover in self._movers:
            mover.attach(peer, description)

    def write(self, peer: Peer, handoff: AttemptKey, src: Pages, dst: Pages) -> None:
        for mover in self._movers:
            mover.write(peer, handoff, src, dst)

    def cancel(self, peer: Peer, handoff: AttemptKey) -> None:
        for mover in self._movers:
            mover.cancel(peer, handoff)

    def probe(self, peer: Peer) -> Future[PairSpeed]:
        """Measure how fast the first rank reaches a peer."""
        return self._movers[0].probe(peer)

    def forget(self, peer: Peer) -> None:
        for mover in self._movers:
            mover.forget(peer)

    async def settle(self, ended: Peer) -> None:
        for mover in self._movers:
            await asyncio.to_thread(mover.cut, ended)
        await until_read()

    def close(self) -> None:
        for mover in self._movers:
            mover.close()


AnyMover = Mover | RankedMover


def _share_of(backend: Backend) -> Share:
    share = backend.region.share
    assert share is not None, "a rank with memory of its own"
    return share


def _tell(on_stopped: OnStopped, part: int, message: ReceiverMessage) -> None:
    assert isinstance(message.event, CopyStopped)
    on_stopped(replace(message, event=replace(message.event, part=part)))
