"""The ranks of a sender together write each byte of each page once, to where the receiver's ranks look for it."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from divided_pages import (
    HEADS,
    LAYERS,
    RUN_BYTES,
    WAYS_TO_DIVIDE,
    WHOLE,
    Divided,
    by_heads,
    by_layers,
    copies,
    random_pages,
)
from hypothesis import given
from hypothesis import strategies as st
from loopback import rows_of

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import PageId
from pdserve.kvtransfer.region import Description, Region, decode_ranks, encode_ranks
from pdserve.kvtransfer.routes import Share, check_shares, routes, whole_of
from pdserve.kvtransfer.session import of_parts
from pdserve.kvtransfer.ways import ways_to

SRC, DST = (np.array(pages, np.int32) for pages in ((5, 0, 3), (1, 4, 2)))
PAGES = tuple([PageId(page) for page in SRC.tolist()])
DESCRIPTION = Description(4096, 6, 192, 8192, 2, b"metadata")


@pytest.mark.parametrize("target", WAYS_TO_DIVIDE)
@pytest.mark.parametrize("source", WAYS_TO_DIVIDE)
def test_each_byte_of_each_page_is_written_once_and_to_its_place(source: str, target: str) -> None:
    ours, theirs = (
        Divided.of(random_pages(6), WAYS_TO_DIVIDE[source]),
        Divided.of(random_pages(6, 2), WAYS_TO_DIVIDE[target]),
    )
    wanted = theirs.whole()
    wanted[DST] = ours.whole()[SRC]
    num_bytes = 0
    for region in ours.regions:
        assert region.share is not None
        for number, route in routes(region.share, theirs.shares, RUN_BYTES):
            rows = rows_of(region, SRC, route.source), rows_of(theirs.regions[number], DST, route.target)
            for here, there in zip(*rows, strict=True):
                there[:] = here
                num_bytes += len(here)
    assert np.array_equal(theirs.whole(), wanted)
    assert num_bytes == len(SRC) * WHOLE.num_runs * RUN_BYTES * theirs.num_copies, "a byte was written twice"


@pytest.mark.parametrize("num_copies", [2, 3])
def test_ranks_that_hold_the_same_send_an_even_part_of_it_each_in_one_row(num_copies: int) -> None:
    latent = Share((0, 61), (0, 1))
    ranks, target = copies(num_copies, (latent,)), copies(2, (latent,))
    for share in ranks:
        ways = [route for _, route in routes(share, target, RUN_BYTES)]
        assert len(ways) == len(target)
        assert {(way.source.count, way.target.count) for way in ways} == {(1, 1)}
        assert {way.page_bytes for way in ways} <= {61 // num_copies * RUN_BYTES, (61 // num_copies + 1) * RUN_BYTES}


def test_neighbouring_heads_go_in_one_row_where_no_layers_are_parted() -> None:
    for shares in (by_heads(1), by_heads(2), by_heads(3), by_heads(4)):
        assert {route.source.count for _, route in routes(WHOLE, shares, RUN_BYTES)} == {1}
        assert {route.target.count for each in shares for _, route in routes(each, (WHOLE,), RUN_BYTES)} == {1}
    ((_, parted),) = routes(by_layers(2)[0], (WHOLE,), RUN_BYTES)
    assert (parted.source.count, parted.page_bytes) == (HEADS, WHOLE.num_runs // 2 * RUN_BYTES)


@pytest.mark.parametrize("divided", WAYS_TO_DIVIDE)
def test_a_page_has_the_same_digest_however_it_is_divided(divided: str) -> None:
    pages = random_pages(6)
    parts = Divided.of(pages, WAYS_TO_DIVIDE[divided])
    whole = Region.of_rank(pages, WHOLE, WHOLE)
    digests = of_parts([region.digests_of_sent(PAGES) for region in parts.regions])
    assert digests == whole.digests(PAGES)
    for copy in range(parts.num_copies):
        of_copy = [region for region in parts.regions if region.share is not None and region.share.copy == copy]
        assert of_parts([region.digests(PAGES) for region in of_copy]) == digests
    parts.parts[-1][3, -1] ^= 1
    assert of_parts([region.digests_of_sent(PAGES) for region in parts.regions])[:2] == digests[:2]
    assert of_parts([region.digests_of_sent(PAGES) for region in parts.regions])[2] != digests[2]


def test_runs_that_change_places_change_the_digest_of_their_page() -> None:
    pages = random_pages(6)
    before = Region.of_rank(pages, WHOLE, WHOLE).digests(PAGES)
    runs = pages.reshape(6, -1, RUN_BYTES)
    runs[0, [7, 20]] = runs[0, [20, 7]]
    after = Region.of_rank(pages, WHOLE, WHOLE).digests(PAGES)
    assert [mine != theirs for mine, theirs in zip(before, after, strict=True)] == [False, True, False]


@pytest.mark.parametrize("divided", WAYS_TO_DIVIDE)
def test_ranks_that_hold_each_layer_and_head_once_are_a_worker(divided: str) -> None:
    shares = WAYS_TO_DIVIDE[divided]
    assert whole_of(shares) == WHOLE
    check_shares(shares, WHOLE)
    if shares[0].num_copies > 1:
        for wrong in (shares[:-1], (*shares, shares[0]), tuple([replace(each, num_copies=5) for each in shares])):
            with pytest.raises(ProtocolError, match="or once in each copy"):
                check_shares(wrong, WHOLE)


@pytest.mark.parametrize(
    "shares",
    [
        by_heads(2)[:1],
        (*by_heads(2), by_heads(2)[0]),
        (WHOLE, WHOLE),
        (Share((0, LAYERS), (0, 4)), Share((0, LAYERS), (3, 5))),
        (Share((0, LAYERS), (0, 7)),),
        (WHOLE, Share((2, 2), (0, 6))),
        (*by_heads(2), Share((3, 1), (0, 6))),
    ],
)
def test_ranks_that_hold_something_twice_or_lack_it_are_refused(shares: tuple[Share, ...]) -> None:
    with pytest.raises(ProtocolError, match="do not hold each layer and KV head once"):
        check_shares(shares, WHOLE)


def test_what_ranks_describe_is_read_as_it_was_written() -> None:
    ranks = tuple([(share, DESCRIPTION) for share in copies(2, by_heads(3))])
    assert decode_ranks(encode_ranks(ranks)) == ranks


@given(st.binary(max_size=200), st.booleans())
def test_whatever_bytes_describe_ranks_they_are_read_or_refused(data: bytes, begins_well: bool) -> None:
    with suppress(ProtocolError):
        ranks = decode_ranks(b"PDKR\0\3\0\2" + data if begins_well else data)
        check_shares([share for share, _ in ranks], WHOLE)


def test_a_peer_with_more_rows_than_can_be_named_is_refused() -> None:
    half, whole = Share((0, 1), (0, 256)), Share((0, 2), (0, 256))
    region = Region.of_rank(np.zeros((2, half.num_runs), np.uint8), half, whole)
    there = Description(0, (1 << 31) // 256 - 2, whole.num_runs, 0, 2, b"")
    fewer = replace(there, num_pages=there.num_pages - 1)
    assert len(ways_to(encode_ranks([(whole, fewer)]), region, region.page_bytes)) == 1
    with pytest.raises(ProtocolError, match="num_pages: 8388608 have more rows"):
        ways_to(encode_ranks([(whole, there)]), region, region.page_bytes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:5], "5 bytes"),
        (lambda data: data[:20], "20 bytes for 2 ranks"),
        (lambda data: data + b"x", "its ranks take"),
        (lambda data: b"PDKV" + data[4:], "PDKV"),
        (lambda data: data[:4] + b"\0\x09" + data[6:], "version 9"),
        (lambda data: data[:6] + b"\0\0" + data[8:], "with 0 ranks"),
        (lambda data: data[:6] + b"\0\3" + data[8:], "for 3 ranks"),
        (lambda data: data[:-2], "bytes, its header says"),
    ],
)
def test_ranks_that_are_described_wrongly_are_refused(change: object, problem: str) -> None:
    data = encode_ranks([(share, DESCRIPTION) for share in by_heads(2)])
    with pytest.raises(ProtocolError, match=problem):
        decode_ranks(change(data))  # type: ignore[operator]
