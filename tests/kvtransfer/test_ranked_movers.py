"""Movers of ranks with memory of their own: a page arrives whole, whoever holds which part at either end."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest
from divided_pages import WAYS_TO_DIVIDE, Divided, by_heads, random_pages
from long_cases import long
from loopback import LoopbackBackend
from mover_settings import HANDOFF, pages
from ranked_movers import ranked_mover

from pdserve.base.clock import new_incarnation
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Peer, WorkerId
from pdserve.kvtransfer.backends.backend import Backend, Indices, PostError, Transfer, TransferLostError, Way
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.ranked_mover import RankedMover
from pdserve.kvtransfer.region import Description, Region
from pdserve.kvtransfer.session import of_parts
from pdserve.kvtransfer.ways import connect

SRC, DST = pages(5, 0, 30, 7), pages(3, 31, 4, 9)
PAIRS = [
    ("one rank", "two ranks"),
    ("two ranks", "one rank"),
    ("two ranks", "two ranks"),
    ("two stages", "three ranks"),
]
PAIRS += [("four ranks", "three ranks"), ("three stages", "stages of ranks")]
PAIRS += [("one rank", "two copies"), ("three copies", "one rank"), ("three copies", "two copies")]
PAIRS += [("copies of heads", "two ranks"), ("two stages", "copies of heads")]

DESCRIPTION = Description(0, 2, 64, 0, 1, b"")


@dataclass
class Worker:
    pages: Divided
    regions: tuple[Region, ...]
    mover: RankedMover
    peer: Peer
    stopped: "queue.SimpleQueue[ReceiverMessage]"

    def write(self, target: "Worker") -> list[CopyStopped]:
        """Copy some pages; return how each part ended, in the order of ranks."""
        self.mover.write(target.peer, HANDOFF, SRC, DST)
        ended = [self.stopped.get(timeout=20).event for _ in self.pages.shares]
        assert all(isinstance(each, CopyStopped) for each in ended)
        return sorted(ended, key=lambda each: each.part)  # type: ignore[union-attr, return-value]


@dataclass(frozen=True)
class Making:
    library: str
    stack: ExitStack

    def worker(self, name: str, divided: str, seed: int) -> Worker:
        content = Divided.of(random_pages(32, seed), WAYS_TO_DIVIDE[divided])
        peer, stopped = Peer(WorkerId(name), new_incarnation()), queue.SimpleQueue[ReceiverMessage]()
        regions = content.regions
        mover = self.stack.enter_context(ranked_mover([self._backend(peer, each) for each in regions], stopped.put))
        return Worker(content, regions, mover, peer, stopped)

    def _backend(self, me: Peer, region: Region) -> Backend:
        if self.library == "loopback":
            return LoopbackBackend(region)
        return NixlBackend(me, region, Network(tcp_only=self.library.endswith("tcp")))


@pytest.fixture(params=["loopback", "nixl", *long("nixl-tcp")])
def making(request: pytest.FixtureRequest) -> Iterator[Making]:
    with ExitStack() as stack:
        yield Making(request.param, stack)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_pages_that_are_divided_one_way_arrive_divided_another_way(making: Making, source: str, target: str) -> None:
    ours, theirs = making.worker("p", source, 1), making.worker("d", target, 2)
    wanted = theirs.pages.whole()
    wanted[list(DST)] = ours.pages.whole()[list(SRC)]
    ours.mover.attach(theirs.peer, theirs.mover.describe())
    ended = ours.write(theirs)
    assert [each.part for each in ended] == list(range(len(ours.pages.shares)))
    assert np.array_equal(theirs.pages.whole(), wanted)
    digests = of_parts([each.digests or () for each in ended])
    assert theirs.mover.first_mismatch(DST, digests) is None
    theirs.pages.parts[-1][DST[2], 0] ^= 1
    assert theirs.mover.first_mismatch(DST, digests) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [*long(*PAIRS[:2]), *PAIRS[2:4]])
def test_probes_of_divided_pages_write_as_copies_do_and_to_no_page(making: Making, source: str, target: str) -> None:
    ours, theirs = making.worker("p", source, 1), making.worker("d", target, 2)
    before, written = theirs.pages.whole(), random_pages(1)
    for region, part in zip(ours.regions, Divided.of(written, ours.pages.shares).parts, strict=True):
        region.probe[0] = part[0]
    ours.mover.attach(theirs.peer, theirs.mover.describe())
    assert ours.mover.probe(theirs.peer).result(20).bytes_per_s > 0
    assert np.array_equal(theirs.pages.whole(), before)
    found = Divided(theirs.pages.shares, tuple([region.probe[:1] for region in theirs.regions])).whole()
    wanted = Divided.of(written, ours.pages.shares[:1]).whole()  # the first rank is measured
    assert np.array_equal(found, wanted)


def test_a_peer_that_lacks_a_rank_or_has_pages_of_another_size_is_refused() -> None:
    with ExitStack() as stack:
        making = Making("loopback", stack)
        ours, theirs = making.worker("p", "two ranks", 1), making.worker("d", "two ranks", 2)
        lacking = stack.enter_context(ranked_mover([LoopbackBackend(theirs.pages.regions[0])], lambda _: None))
        small = [
            Region.of_rank(np.zeros((32, each.num_runs * 8), np.uint8), each, by_heads(1)[0]) for each in by_heads(2)
        ]
        smaller = stack.enter_context(ranked_mover([LoopbackBackend(region) for region in small], lambda _: None))
        alone = Mover(LoopbackBackend(Region.of(random_pages(32))), lambda _: None)
        stack.callback(alone.close)
        for mover, problem in ((lacking, "each layer and KV head once"), (smaller, "page_bytes"), (alone, "PDKV")):
            with pytest.raises(ProtocolError, match=problem):
                ours.mover.attach(theirs.peer, mover.describe())


@dataclass
class Scripted:
    """Ways, by their number: what becomes of a slice on each. None: it is under way."""

    ends: dict[int, PostError | bool | None]
    refused: dict[int, PostError] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def connect(self, way: Way, source: Region) -> "OnWay":
        if way.there.address not in self.ends:
            raise PostError("it cannot be reached")
        return OnWay(self, way.there.address)

    def posted(self) -> Transfer | None:
        ways = [Way(replace(DESCRIPTION, address=number)) for number in (0, 1)]
        connection = connect(cast("Backend", self), ways, Region.of(random_pages(2)))
        return connection.post(np.array([0], np.int32), np.array([1], np.int32))


@dataclass(frozen=True)
class OnWay:
    ways: Scripted
    number: int

    def post(self, src: Indices, dst: Indices) -> "OnWay | None":
        if (error := self.ways.refused.get(self.number)) is not None:
            raise error
        return None if self.ways.ends[self.number] is True else self

    def has_landed(self) -> bool:
        end = self.ways.ends[self.number]
        if isinstance(end, PostError):
            raise end
        return end is not None

    def close(self) -> None:
        self.ways.closed.append(self.number)


def ended(ways: Scripted, **ends: PostError | bool) -> None:
    ways.ends |= {int(name[1:]): end for name, end in ends.items()}


def test_a_slice_has_landed_when_it_has_on_all_ways() -> None:
    ways = Scripted({0: None, 1: None})
    transfer = ways.posted()
    assert transfer is not None
    assert not transfer.has_landed()
    ended(ways, _1=False)
    assert not transfer.has_landed()
    ended(ways, _0=False)
    assert transfer.has_landed()
    assert Scripted({0: True, 1: True}).posted() is None


@pytest.mark.parametrize("first", [0, 1])
def test_a_slice_that_fails_on_one_way_ends_when_the_other_one_has_ended(first: int) -> None:
    ways = Scripted({0: None, 1: None})
    transfer = ways.posted()
    assert transfer is not None
    ways.ends[first] = TransferLostError("reset")
    assert not transfer.has_landed(), "bytes of the other way are still written"
    ways.ends[1 - first] = False
    with pytest.raises(TransferLostError, match="reset"):
        transfer.has_landed()


def test_a_slice_that_cannot_be_posted_on_the_second_way_is_watched_on_the_first() -> None:
    ways = Scripted({0: None, 1: None}, {1: PostError("full")})
    transfer = ways.posted()
    assert transfer is not None
    assert not transfer.has_landed()
    ended(ways, _0=False)
    with pytest.raises(PostError, match="full"):
        transfer.has_landed()
    with pytest.raises(PostError, match="full"):
        Scripted({0: True, 1: None}, {1: PostError("full")}).posted()


def test_a_slice_that_is_lost_on_the_first_way_is_in_doubt_though_the_second_could_not_be_posted() -> None:
    ways = Scripted({0: TransferLostError("reset"), 1: None}, {1: PostError("full")})
    transfer = ways.posted()
    assert transfer is not None
    with pytest.raises(TransferLostError, match="reset"):
        transfer.has_landed()


def test_a_peer_of_which_one_rank_cannot_be_reached_keeps_no_connection() -> None:
    ways = Scripted({0: None})
    with pytest.raises(PostError, match="it cannot be reached"):
        ways.posted()
    assert ways.closed == [0]
