"""Bytes of an ended process that its receiver has read, and that are not in their pages yet."""

import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from gpu_pages import num_wrong_rows
from half_slice import MEETING, greeted, half_slice

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend, Writer
from pdserve.kvtransfer.backends.pairing import Framed
from pdserve.kvtransfer.backends.staging import STAGE_BYTES, HostRows, Rows
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import ByteRows, Region

pytestmark = pytest.mark.slow

NUM_PAGES, PAGE_BYTES = 8, 1 << 16
TARGET, ENDED, OTHER = (Peer(WorkerId(name), Incarnation(3)) for name in ("target", "ended", "other"))


@pytest.fixture
def view() -> ByteRows:
    return np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)


@pytest.fixture
def receiver(view: ByteRows) -> Iterator[Mover]:
    mover = Mover(CollectiveBackend(TARGET, Region.of(view), MEETING, staged=True), lambda _: None)
    yield mover
    mover.close()


def test_a_slice_that_is_whole_reaches_its_pages(receiver: Mover, view: ByteRows) -> None:
    with half_slice(receiver.describe(), ENDED) as writer:
        assert not view.any()
        assert writer.send_rest()
    assert view[:2].all()


async def test_once_an_end_is_settled_nothing_of_it_reaches_a_page(receiver: Mover, view: ByteRows) -> None:
    with half_slice(receiver.describe(), ENDED) as ended, half_slice(receiver.describe(), OTHER) as other:
        await receiver.settle(ENDED)
        assert not ended.send_rest()
        assert not view.any()
        assert other.send_rest()
        assert view[:2].all()


def test_a_process_that_has_ended_is_let_in_no_more(receiver: Mover) -> None:
    receiver.cut(ENDED)
    with greeted(receiver.describe(), ENDED) as ended:
        ended.settimeout(10)
        assert not ended.recv(1)
    with half_slice(receiver.describe(), OTHER) as other:
        assert other.send_rest()


def test_a_receiver_that_is_closed_puts_nothing_more_into_pages(view: ByteRows) -> None:
    receiver = Mover(CollectiveBackend(TARGET, Region.of(view), MEETING, staged=True), lambda _: None)
    with half_slice(receiver.describe(), OTHER) as writer:
        receiver.close()
        assert not writer.send_rest()
    assert not view.any()


def host_rows(view: ByteRows) -> HostRows:
    return HostRows(torch.from_numpy(view), torch.zeros((1, view.shape[1]), dtype=torch.uint8))


class _SlowRows(HostRows):
    """Copies into rows when it is told to."""

    def __init__(self, view: ByteRows) -> None:
        super().__init__(torch.from_numpy(view), torch.from_numpy(view[:0]))
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, rows: Rows, received: Sequence[torch.Tensor]) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        super().write(rows, received)


def receive_ones(memory: Sequence[torch.Tensor]) -> None:
    for row in memory:
        row[:] = 1


def test_a_cut_waits_for_the_copy_under_way(view: ByteRows) -> None:
    rows = _SlowRows(view)
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = Writer(Framed(socket.create_connection(server.getsockname())), rows)
    putting = threading.Thread(target=writer.put, args=([3], receive_ones))
    cutting = threading.Thread(target=writer.cut)
    putting.start()
    assert rows.begun.wait(10)
    cutting.start()
    cutting.join(0.1)
    assert cutting.is_alive()
    rows.go_on.set()
    cutting.join(10)
    assert view[3].all()
    putting.join(10)
    with pytest.raises(OSError, match="cut"):
        writer.put([4], receive_ones)
    assert not view[4].any()


@pytest.mark.parametrize(
    ("row_bytes", "num_times"), [(STAGE_BYTES // 100, 30), (STAGE_BYTES // 3, 1), (STAGE_BYTES * 2, 1)]
)
def test_however_many_rows_are_named_one_stage_is_used_again_and_again(row_bytes: int, num_times: int) -> None:
    view = np.zeros((7, row_bytes), np.uint8)
    rows = host_rows(view)
    named = [6, 0, 3, 5, 1, 2, 4] * num_times
    seen: list[int] = []
    stages: set[int] = set()
    for part, memory in rows.parts(named):
        assert sum(row.nbytes for row in memory) <= max(STAGE_BYTES, row_bytes)
        stages.add(memory[0].data_ptr())
        for row, staged in zip(part, memory, strict=True):
            staged[:] = row + 1
        rows.write(part, memory)
        seen += part
    assert seen == named
    assert len(stages) == 1
    assert [set(row.tolist()) for row in view[:, :8]] == [{row + 1} for row in range(7)]


def test_rows_are_taken_out_as_they_were(view: ByteRows) -> None:
    view[:] = np.arange(NUM_PAGES, dtype=np.uint8)[:, None]
    taken = host_rows(view).read([5, NUM_PAGES, 2])  # the one in the middle is probe memory's
    view[:] = 9
    assert [int(row[0]) for row in taken] == [5, 0, 2]


def test_a_slice_of_no_pages_is_put_in_no_time(view: ByteRows) -> None:
    assert list(host_rows(view).parts([])) == []


def test_what_is_checked_on_a_gpu_holds_on_a_cpu() -> None:
    assert num_wrong_rows(torch.device("cpu")) == 0
