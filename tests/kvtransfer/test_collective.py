"""What is particular to the mover over torch.distributed: its receiver takes writes, and only those it should."""

import queue
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveMover
from pdserve.kvtransfer.backends.framing import Framed
from pdserve.kvtransfer.backends.pairing import SECRET_BYTES, WRITER, Greeting, meet
from pdserve.kvtransfer.mover import ByteRows, CopyStopped, Description, Region
from pdserve.kvtransfer.session import HandoffKey, Peer

HANDOFF = HandoffKey(RequestId(bytes(16)), Attempt(0))

NUM_PAGES, PAGE_BYTES = 64, 1 << 16
TARGET = Peer(WorkerId("target"), Incarnation(1))
WRITER_PEER = Peer(WorkerId("writer"), Incarnation(7))
WRITER_PROCESS = Path(__file__).with_name("writer_process.py")
LEAVING_PROCESS = Path(__file__).with_name("leaving_process.py")
EVERYTHING = tuple(map(PageId, range(NUM_PAGES)))


@pytest.fixture
def view() -> ByteRows:
    return np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)


@pytest.fixture(params=[False, True], ids=["in place", "staged"])
def receiver(view: ByteRows, request: pytest.FixtureRequest) -> Iterator[CollectiveMover]:
    mover = CollectiveMover(TARGET, Region.of(view), lambda _: None, staged=request.param)
    yield mover
    mover.close()


def address_of(receiver: CollectiveMover) -> tuple[str, int]:
    host, _, port = Description.decode(receiver.describe()).lane[SECRET_BYTES:].decode().rpartition(":")
    return host, int(port)


def connected(receiver: CollectiveMover) -> tuple[Framed, bytes]:
    """Return a socket to the receiver's listener, and what a writer says there first."""
    raw = socket.create_connection(address_of(receiver), 5)
    secret = Description.decode(receiver.describe()).lane[:SECRET_BYTES]
    return Framed(raw), Greeting(secret, WRITER_PEER).encode()


def assert_takes_writes(receiver: CollectiveMover, view: ByteRows) -> None:
    mine = np.random.default_rng(1).integers(0, 256, view.shape, np.uint8)
    stopped: queue.SimpleQueue[CopyStopped] = queue.SimpleQueue()
    writer = CollectiveMover(WRITER_PEER, Region.of(mine), stopped.put)
    try:
        writer.attach(TARGET, receiver.describe())
        writer.write(TARGET, HANDOFF, EVERYTHING, EVERYTHING)
        assert stopped.get(timeout=20).digests is not None
        assert np.array_equal(view, mine)
    finally:
        writer.close()


def test_it_listens_on_the_loopback_interface_unless_told_otherwise(receiver: CollectiveMover) -> None:
    lane = Description.decode(receiver.describe()).lane
    assert lane[SECRET_BYTES:].startswith(b"127.0.0.1:")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda greeting: Greeting(bytes(SECRET_BYTES), WRITER_PEER).encode(),
        lambda greeting: b"",
        lambda greeting: greeting[:SECRET_BYTES],
        lambda greeting: greeting[: -len(WRITER_PEER.worker_id)],
        lambda greeting: greeting + b"\xff",
        lambda greeting: greeting + bytes(1 << 20),
    ],
)
def test_who_does_not_know_the_secret_or_has_no_name_is_cut_off_and_others_are_served(
    receiver: CollectiveMover, view: ByteRows, spoil: Callable[[bytes], bytes]
) -> None:
    stranger, greeting = connected(receiver)
    stranger.send(spoil(greeting))
    with pytest.raises(OSError, match=r"ended|reset"):
        stranger.receive(100)
    stranger.close()
    assert_takes_writes(receiver, view)


def test_a_page_that_is_not_there_ends_the_connection_before_anything_is_written(
    receiver: CollectiveMover, view: ByteRows
) -> None:
    hostile, greeting = connected(receiver)
    hostile.send(greeting)
    group = meet(hostile, WRITER)
    hostile.send(np.array([1 << 20], ">u4").tobytes())
    with pytest.raises(OSError, match="ended"):
        hostile.receive(100)
    del group
    hostile.close()
    assert not view.any()
    assert_takes_writes(receiver, view)


def test_words_that_make_no_sense_end_a_connection_and_others_are_served(
    receiver: CollectiveMover, view: ByteRows
) -> None:
    stranger, greeting = connected(receiver)
    stranger.send(greeting)
    meet(stranger, WRITER)
    stranger.send(b"odd")
    with pytest.raises(OSError, match="ended"):
        stranger.receive(100)
    stranger.close()
    assert_takes_writes(receiver, view)


def test_a_receiver_that_runs_out_of_files_takes_writers_again_when_there_are_some(
    receiver: CollectiveMover, view: ByteRows, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()
    caplog.handler.addFilter(lambda record: failed.set() or True)
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:  # with the last file there is
        resource.setrlimit(resource.RLIMIT_NOFILE, (stranger.fileno() + 1, most))
        try:
            stranger.connect(address_of(receiver))
            assert failed.wait(5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert "Too many open files" in caplog.text
    assert_takes_writes(receiver, view)


def test_a_receiver_outlives_writers_that_are_killed_as_they_write(receiver: CollectiveMover, view: ByteRows) -> None:
    for _ in range(2):
        command = [sys.executable, str(WRITER_PROCESS), receiver.describe().hex(), str(NUM_PAGES), str(PAGE_BYTES)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
        writer.communicate()
    assert_takes_writes(receiver, view)


def test_a_process_that_has_closed_its_movers_leaves_in_good_order() -> None:
    left = subprocess.run([sys.executable, str(LEAVING_PROCESS)], capture_output=True, text=True, check=False)
    assert (left.returncode, left.stderr) == (0, "")
