"""The movers of a worker whose ranks have memory of their own, as one.

Invariant: each rank's mover writes its part of a copy, and the end of each part is reported once, with its number.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from pdserve.base.errors import InvariantError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer.conversion import Conversion
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import decode_ranks, encode_ranks, first_difference
from pdserve.kvtransfer.remote_mover import RemoteMover
from pdserve.kvtransfer.routes import check_shares, whole_of
from pdserve.kvtransfer.session import Digests, of_parts
from pdserve.kvtransfer.speed import PairSpeed
from pdserve.protocol.page_tables import Pages


class RankedMover:
    """See `Mover`, whose methods these are. Each rank has an agent of the library, with its own memory alone."""

    def __init__(self, own: Mover, others: Sequence[RemoteMover]) -> None:
        """own: the mover of the first rank, in this process. others: of all further ranks, in their order."""
        self._own, self._others = own, tuple(others)
        self._movers: tuple[Mover | RemoteMover, ...] = (own, *self._others)
        described = [own.describe(), *[other.description for other in self._others]]
        self._described = tuple([rank for each in described for rank in decode_ranks(each)])

    @property
    def name(self) -> str:
        return self._own.name

    @property
    def num_stalled(self) -> int:
        return len(frozenset[Peer]().union(*[mover.stalled for mover in self._movers]))

    @property
    def turns(self) -> tuple[int | None, ...]:
        return tuple([mover.turn for mover in self._movers])

    def describe(self) -> bytes:
        return encode_ranks(self._described)

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        """Return the position of the first page whose digest differs in one of the copies, or None."""
        others = [other.digests(pages) for other in self._others]
        parts = [self._own.region.digests(pages), *[each.result().digests for each in others]]
        copies: dict[int, list[Digests]] = {}
        for (share, _), part in zip(self._described, parts, strict=True):
            copies.setdefault(share.copy, []).append(part)
        found = [first_difference(of_parts(each), digests) for each in copies.values()]
        return min([position for position in found if position is not None], default=None)

    def attach(self, peer: Peer, description: bytes, conversion: Conversion | None = None) -> None:
        """Prepare writes of each rank to those of the peer's ranks that hold a part of what it holds; blocks."""
        if conversion is not None:
            raise InvariantError("pages in parts are converted for nobody: their digests name no type")
        whole = whole_of([share for share, _ in self._described])
        check_shares([share for share, _ in decode_ranks(description)], whole)
        attached = [other.attach(peer, description) for other in self._others]
        self._own.attach(peer, description)
        for each in attached:
            each.result()

    def write(self, peer: Peer, handoff: AttemptKey, src: Pages, dst: Pages) -> None:
        for mover in self._movers:
            mover.write(peer, handoff, src, dst)

    def cancel(self, peer: Peer, handoff: AttemptKey) -> None:
        for mover in self._movers:
            mover.cancel(peer, handoff)

    def probe(self, peer: Peer) -> Future[PairSpeed]:
        """Measure how fast the first rank reaches a peer."""
        return self._own.probe(peer)

    def forget(self, peer: Peer) -> None:
        for mover in self._movers:
            mover.forget(peer)

    async def settle(self, ended: Peer) -> None:
        """See `Mover`. Each rank has connections of its own; one that hangs may still have to read them."""
        others = [asyncio.wrap_future(other.settle(ended)) for other in self._others]
        await self._own.settle(ended)
        for each in others:
            await each

    def close(self) -> None:
        for mover in self._movers:
            mover.close()


AnyMover = Mover | RankedMover
