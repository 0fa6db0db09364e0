"""Pages whose digests a kernel takes where they lie are handed off like any others."""

import queue

import numpy as np
import pytest
import reference_kernels as reference
import torch
from divided_pages import HEADS, WHOLE, Divided, by_heads, by_layers, copies, random_pages
from long_cases import long
from loopback import loopback_mover

from pdserve.base.errors import InvariantError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.pairing import Meeting
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.device_region import device_region
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.session import of_parts

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))

NUM_PAGES, PAGE_BYTES = 12, 3 * 8192 + 40
SRC, DST = tuple(map(PageId, (1, 5, 0))), tuple(map(PageId, (7, 2, 11)))
TARGET = Peer(WorkerId("target"), Incarnation(1))


def some_pages() -> torch.Tensor:
    return torch.randint(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def mover_of(kind: str, name: str, region: Region, on_stopped: OnStopped) -> Mover:
    if kind == "loopback":
        return loopback_mover(region, on_stopped)
    me = Peer(WorkerId(name), Incarnation(1))
    if kind == "collective":
        return Mover(CollectiveBackend(me, region, Meeting(b"s" * 32), staged=True), on_stopped)
    return Mover(NixlBackend(me, region, Network()), on_stopped)


def test_digests_are_what_the_kernels_reference_says_as_numbers_without_a_sign() -> None:
    pages = some_pages()
    wanted = reference.page_digests(pages[list(SRC)]).tolist()
    assert device_region(pages).digests(SRC) == tuple(digest % 2**64 for digest in wanted)


@pytest.mark.parametrize("num_ranks", [2, *long(1, 3, 4)])
def test_digests_of_the_parts_of_ranks_add_up_to_that_of_the_whole_page(num_ranks: int) -> None:
    pages = random_pages(12)
    divided = Divided.of(pages, by_heads(num_ranks))
    parts = zip(divided.parts, divided.shares, strict=True)
    regions = [device_region(torch.from_numpy(part), share, WHOLE) for part, share in parts]
    found = of_parts([region.digests(SRC) for region in regions])
    assert found == device_region(torch.from_numpy(pages)).digests(SRC)
    assert [region.share for region in regions] == list(divided.shares)


@pytest.mark.parametrize("num_copies", [2, *long(3)])
def test_ranks_that_hold_the_same_send_parts_whose_digests_add_up(num_copies: int) -> None:
    pages, shares = random_pages(12), copies(num_copies, by_heads(HEADS))
    parts = zip(Divided.of(pages, shares).parts, shares, strict=True)
    regions = [device_region(torch.from_numpy(part), share, WHOLE) for part, share in parts]
    wanted = device_region(torch.from_numpy(pages)).digests(SRC)
    assert of_parts([region.digests_of_sent(SRC) for region in regions]) == wanted
    for copy in range(num_copies):
        assert of_parts([region.digests(SRC) for region in regions[copy::num_copies]]) == wanted


def test_stages_are_refused_whose_runs_do_not_follow_one_another_in_a_page() -> None:
    (stage, _) = by_layers(2)
    (part, _) = Divided.of(random_pages(12), by_layers(2)).parts
    with pytest.raises(InvariantError, match="its runs do not follow one another"):
        device_region(torch.from_numpy(part), stage, WHOLE)


@pytest.mark.parametrize("kind", ["loopback", "nixl", "collective"])
def test_a_copy_between_tensors_carries_digests_that_agree_on_both_sides(kind: str) -> None:
    mine, theirs = some_pages(), torch.zeros((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
    target = device_region(theirs)
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    writer = mover_of(kind, "writer", device_region(mine), stopped.put)
    receiver = mover_of(kind, "target", target, lambda _: None)
    try:
        writer.attach(TARGET, receiver.describe())
        writer.write(TARGET, HANDOFF, SRC, DST)
        digests = stopped.get(timeout=20).event.digests
    finally:
        writer.close()
        receiver.close()
    assert digests is not None
    assert np.array_equal(theirs[list(DST)], mine[list(SRC)])
    assert target.first_mismatch(DST, digests) is None
    theirs[DST[1], 100] ^= 1
    assert target.first_mismatch(DST, digests) == 1


def test_a_region_of_a_gpu_says_whose_memory_it_is() -> None:
    pages = some_pages()
    region = Region(pages, pages[:1], pages.data_ptr(), pages.data_ptr(), lambda _: (), gpu=2)
    assert region.description(b"metadata").gpu == 2
    assert Region.of(pages.numpy()).description(b"metadata").gpu is None
