"""Bytes of an ended process that its receiver has read, and that are not in their pages yet."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from half_slice import MEETING, greeted, half_slice

from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveMover
from pdserve.kvtransfer.backends.staging import STAGE_BYTES, Entry, Rows, Staging
from pdserve.kvtransfer.backends.unread import settle
from pdserve.kvtransfer.gpu_check import num_wrong_rows
from pdserve.kvtransfer.mover import ByteRows, Region
from pdserve.kvtransfer.session import Peer

NUM_PAGES, PAGE_BYTES = 8, 1 << 16
TARGET, ENDED, OTHER = (Peer(WorkerId(name), Incarnation(3)) for name in ("target", "ended", "other"))


@pytest.fixture
def view() -> ByteRows:
    return np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)


@pytest.fixture
def receiver(view: ByteRows) -> Iterator[CollectiveMover]:
    mover = CollectiveMover(TARGET, Region.of(view), lambda _: None, MEETING, staged=True)
    yield mover
    mover.close()


def test_a_slice_that_is_whole_reaches_its_pages(receiver: CollectiveMover, view: ByteRows) -> None:
    with half_slice(receiver.describe(), ENDED) as writer:
        assert not view.any()
        assert writer.send_rest()
    assert view[:2].all()


async def test_once_an_end_is_settled_nothing_of_it_reaches_a_page(receiver: CollectiveMover, view: ByteRows) -> None:
    with half_slice(receiver.describe(), ENDED) as ended, half_slice(receiver.describe(), OTHER) as other:
        await settle(receiver, ENDED)
        assert not ended.send_rest()
        assert not view.any()
        assert other.send_rest()
        assert view[:2].all()


def test_a_process_that_has_ended_is_let_in_no_more(receiver: CollectiveMover) -> None:
    receiver.cut(ENDED)
    with greeted(receiver.describe(), ENDED) as ended:
        ended.settimeout(10)
        assert not ended.recv(1)
    with half_slice(receiver.describe(), OTHER) as other:
        assert other.send_rest()


def test_a_receiver_that_is_closed_puts_nothing_more_into_pages(view: ByteRows) -> None:
    receiver = CollectiveMover(TARGET, Region.of(view), lambda _: None, MEETING, staged=True)
    with half_slice(receiver.describe(), OTHER) as writer:
        receiver.close()
        assert not writer.send_rest()
    assert not view.any()


class _SlowStaging(Staging):
    """Copies into rows when it is told to."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def put_in(self, rows: Rows, host: object) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        super().put_in(rows, host)


def test_a_cut_waits_for_the_copy_under_way(view: ByteRows) -> None:
    region = Region.of(view)
    staging = _SlowStaging(region)
    entry = Entry(region, staging)
    (part,) = entry.parts([3])
    part.memory[0][:] = 1
    putting = threading.Thread(target=entry.put, args=(part,))
    cutting = threading.Thread(target=entry.cut)
    putting.start()
    assert staging.begun.wait(10)
    cutting.start()
    cutting.join(0.1)
    assert cutting.is_alive()
    staging.go_on.set()
    cutting.join(10)
    assert view[3].all()
    putting.join(10)
    with pytest.raises(OSError, match="cut"):
        entry.put(part)


@pytest.mark.parametrize(
    ("row_bytes", "num_times"), [(STAGE_BYTES // 100, 30), (STAGE_BYTES // 3, 1), (STAGE_BYTES * 2, 1)]
)
def test_however_many_rows_are_named_one_stage_is_used_again_and_again(row_bytes: int, num_times: int) -> None:
    view = np.zeros((7, row_bytes), np.uint8)
    entry = Entry(Region.of(view), Staging(Region.of(view)))
    named = [6, 0, 3, 5, 1, 2, 4] * num_times
    seen: list[int] = []
    stages: set[int] = set()
    for part in entry.parts(named):
        assert sum(row.nbytes for row in part.memory) <= max(STAGE_BYTES, row_bytes)
        stages.add(part.memory[0].data_ptr())
        for row, memory in zip(part.rows, part.memory, strict=True):
            memory[:] = row + 1
        entry.put(part)
        seen += part.rows
    assert seen == named
    assert len(stages) == 1
    assert [set(row.tolist()) for row in view[:, :8]] == [{row + 1} for row in range(7)]


def test_rows_are_taken_out_as_they_were(view: ByteRows) -> None:
    view[:] = np.arange(NUM_PAGES, dtype=np.uint8)[:, None]
    region = Region.of(view)
    taken = Staging(region).take_out([5, NUM_PAGES, 2])  # the one in the middle is probe memory's
    view[:] = 9
    assert taken[:, 0].tolist() == [5, 0, 2]


def test_what_is_checked_on_a_gpu_holds_on_a_cpu() -> None:
    assert num_wrong_rows(torch.device("cpu")) == 0
