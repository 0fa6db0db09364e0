"""Pages for a receiver of another type arrive as rows of that type, with digests of these bytes, by every mover.

What rows mean is written here again, in numpy: codes from a table of all of them.
"""

import queue
from itertools import permutations, product

import numpy as np
import pytest
import torch
from long_cases import long, long_but
from mover_settings import NUM_PAGES, PAGE_BYTES, Setting, Target, Writer, pages
from scripted_backend import DESCRIPTION, SECOND, scripted_rig
from scripted_backend import PAGE_BYTES as SLICE_PAGE_BYTES

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kernels.kv_rows import KvRows
from pdserve.kvtransfer.channels import MAX_SLICES_IN_FLIGHT, MIN_SLICE_PAGES
from pdserve.kvtransfer.conversion import Conversion, conversion_between
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.region import Region
from pdserve.protocol.kvlayout import KvGroup, KvLayout, coded_as

DTYPES = ("float32", "bfloat16", "fp8_e4m3", "int8")
HEAD_DIM = 32
MOVERS = ("loopback", "nixl-shm", "nixl-tcp", "driven-tcp", "collective", "staged")
ALWAYS = (("loopback", "fp8_e4m3"),)  # others in make test-long
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1])


def layout(dtype: str, page_size: int, *, has_windows: bool = False) -> KvLayout:
    window = KvGroup("window", 2, 2, HEAD_DIM, 2 * page_size, window=100)
    return KvLayout("w", 4, 2, HEAD_DIM, page_size, dtype, others=(window,) if has_windows else ())


def random_pages(of: KvLayout, count: int) -> torch.Tensor:
    """Return pages of random rows, of many magnitudes: uint8 [count, page_bytes]."""
    code = coded_as(of.dtype)
    rows = KvRows(HEAD_DIM, torch.float32 if code else getattr(torch, of.dtype), code)
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count * of.page_bytes // rows.row_bytes, HEAD_DIM, generator=generator)
    values *= 10.0 ** torch.linspace(-4, 4, len(values))[:, None]
    return rows.packed(values.to(rows.dtype)).contiguous().view(torch.uint8).view(count, of.page_bytes)


def values_of(given: torch.Tensor, dtype: str) -> np.ndarray:
    """Return the values of pages as float32, which holds those of every type: [rows, head_dim]."""
    if dtype not in ("int8", "fp8_e4m3"):
        return given.view(getattr(torch, dtype)).float().view(-1, HEAD_DIM).numpy()
    rows = given.view(-1, HEAD_DIM + 4).numpy()
    codes, scales = rows[:, :HEAD_DIM], rows[:, HEAD_DIM:].copy().view(np.float32)
    if dtype == "int8":
        return codes.view(np.int8).astype(np.float32) * scales
    sizes = np.append(E4M3, np.nan).astype(np.float32)
    return np.where(codes & 128, -1, 1).astype(np.float32) * sizes[codes & 127] * scales


def due(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return what these values are in pages of another type: uint8 [rows, row bytes]."""
    if dtype == "float32":
        return values.view(np.uint8)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    scales = np.abs(values).max(1, keepdims=True) / np.float32(127 if dtype == "int8" else 448)
    scaled = values / scales
    if dtype == "int8":
        codes = np.rint(scaled).astype(np.int8).view(np.uint8)
    else:
        upper = np.searchsorted(E4M3, np.abs(scaled)).clip(1, len(E4M3) - 1)  # the first size that is not below
        below, above = np.abs(scaled) - E4M3[upper - 1], E4M3[upper] - np.abs(scaled)
        is_below = (below < above) | ((below == above) & (upper % 2 == 1))  # ties: to the even code
        codes = (np.where(is_below, upper - 1, upper) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
    return np.concatenate((codes, scales.view(np.uint8)), 1)


@pytest.mark.parametrize(("source", "target"), [*permutations(DTYPES, 2)])
@pytest.mark.parametrize(("page_size", "has_windows"), [*product((1, 16, 48), (False, True))])
def test_every_row_is_what_the_receiver_would_write_of_its_values(
    source: str, target: str, page_size: int, has_windows: bool
) -> None:
    here, there = (layout(dtype, page_size, has_windows=has_windows) for dtype in (source, target))
    given = random_pages(here, 3)
    conversion = conversion_between(here, there)
    assert conversion is not None
    found = conversion.of(given)
    assert found.shape == (3, there.page_bytes)
    assert np.array_equal(found.view(-1).numpy(), due(values_of(given, source), target).ravel())


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_the_same_type_are_not_converted(dtype: str) -> None:
    assert conversion_between(layout(dtype, 16), layout(dtype, 16)) is None


def converting(setting: Setting, code: str) -> tuple[Writer, Target, Conversion]:
    """Return a writer of bfloat16 pages, attached to a target whose pages are in a byte a value."""
    num_rows = PAGE_BYTES // (HEAD_DIM + 4)
    here, there = (KvLayout("w", num_rows // 2, 1, HEAD_DIM, 1, dtype) for dtype in ("bfloat16", code))
    conversion = conversion_between(here, there)
    assert conversion is not None
    assert there.page_bytes == PAGE_BYTES
    target, view = setting.target(), random_pages(here, NUM_PAGES).numpy()
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    mover = setting.mover(view, stopped.put)
    setting.stack.callback(mover.close)
    mover.attach(target.peer, target.description, conversion)
    return Writer(mover, view, stopped), target, conversion


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "code"), long_but(ALWAYS, product(MOVERS, ("int8", "fp8_e4m3"))), indirect=["setting"]
)
def test_converted_pages_arrive_with_the_digests_of_what_arrived(setting: Setting, code: str) -> None:
    writer, target, conversion = converting(setting, code)
    src, dst = pages(*range(NUM_PAGES)), pages(*reversed(range(NUM_PAGES)))
    for _ in range(2):  # many more slices than are converted at a time
        target.view[:] = 0
        stopped = writer.write(target, src, dst)
        assert stopped.digests == Region.of(target.view).digests(dst)
        assert np.array_equal(target.view[list(dst)], conversion.of(torch.from_numpy(writer.view)).numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["loopback", *long(*(each for each in MOVERS if each != "loopback"))], indirect=True
)
def test_the_way_of_converted_pages_can_be_measured(setting: Setting) -> None:
    writer, target, _ = converting(setting, "int8")
    assert writer.mover.probe(target.peer).result(20).bytes_per_s > 0
    assert writer.write(target, pages(4), pages(9)).digests is not None


CODES_TO_CODES = Conversion(KvRows(60, torch.float32, "int8"), KvRows(60, torch.float32, "fp8_e4m3"), SLICE_PAGE_BYTES)
THIRD = Peer(WorkerId("third"), Incarnation(1))


def test_rows_of_a_slice_are_written_again_only_when_its_transfer_has_ended() -> None:
    with scripted_rig() as rig:
        posted = rig.backend.posted
        rig.mover.attach(SECOND, DESCRIPTION, CODES_TO_CODES)
        rig.write(SECOND, MAX_SLICES_IN_FLIGHT + 1)
        rig.backend.until(lambda: len(posted) == MAX_SLICES_IN_FLIGHT)
        rig.backend.let_it_look()
        used = [row for each in posted for row in each.src]
        assert len(set(used)) == len(used) == MAX_SLICES_IN_FLIGHT * MIN_SLICE_PAGES
        posted[2].end = "landed"
        rig.backend.until(lambda: len(posted) == MAX_SLICES_IN_FLIGHT + 1)
        assert posted[-1].src == posted[2].src
        for each in posted:
            each.end = "landed"
        assert rig.next().digests is not None


def test_what_a_lost_peers_transfers_may_still_read_is_used_for_no_other_peer_before_they_end() -> None:
    with scripted_rig() as rig:
        posted, sources = rig.backend.posted, rig.backend.sources
        rig.mover.attach(SECOND, DESCRIPTION, CODES_TO_CODES)
        rig.write(SECOND, 1)
        rig.backend.until(lambda: len(posted) == 1)
        rig.mover.forget(SECOND)
        assert rig.next().digests is None
        rig.mover.attach(THIRD, DESCRIPTION, CODES_TO_CODES)
        assert sources[-1] not in (rig.backend.region, sources[-2])
        posted[0].end = "landed"
        rig.backend.until(lambda: posted[0] in rig.backend.gone)
        rig.mover.attach(SECOND, DESCRIPTION, CODES_TO_CODES)
        assert sources[-1] is sources[-3]
