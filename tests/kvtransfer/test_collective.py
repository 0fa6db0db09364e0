"""What is particular to the mover over torch.distributed: its receiver takes writes, and only those it should."""

import gc
import queue
import resource
import select
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from half_slice import MEETING
from long_cases import long

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends import collective, pairing
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.backends.pairing import REGION_BYTES, WRITER, Framed, Greeting, greet, meet
from pdserve.kvtransfer.backends.staging import HostRows, Rows
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import ByteRows, Description, Region
from pdserve.net.secret_proof import NONCE_BYTES, PROOF_BYTES, proof_of

pytestmark = pytest.mark.slow

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))

NUM_PAGES, PAGE_BYTES = 64, 1 << 16
TARGET = Peer(WorkerId("target"), Incarnation(1))
WRITER_PEER = Peer(WorkerId("writer"), Incarnation(7))
NAMELESS = Peer(WorkerId(""), Incarnation(7))
WRITER_PROCESS = Path(__file__).with_name("writer_process.py")
LEAVING_PROCESS = Path(__file__).with_name("leaving_process.py")
EVERYTHING = tuple(map(PageId, range(NUM_PAGES)))


@pytest.fixture
def view() -> ByteRows:
    return np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)


@pytest.fixture(params=[False, *long(True)], ids=["in place", "staged"])
def receiver(view: ByteRows, request: pytest.FixtureRequest) -> Iterator[Mover]:
    mover = Mover(CollectiveBackend(TARGET, Region.of(view), MEETING, staged=request.param), lambda _: None)
    yield mover
    mover.close()


def address_of(receiver: Mover) -> tuple[str, int]:
    host, _, port = Description.decode(receiver.describe()).metadata[REGION_BYTES:].decode().rpartition(":")
    return host, int(port)


def connected(receiver: Mover) -> tuple[Framed, Greeting]:
    """Return a socket to the receiver's listener, and what a writer says of itself there."""
    raw = socket.create_connection(address_of(receiver), 5)
    region = Description.decode(receiver.describe()).metadata[:REGION_BYTES]
    return Framed(raw), Greeting(region, WRITER_PEER)


def shown(greeting: Greeting, challenge: bytes, secret: bytes = MEETING.secret) -> bytes:
    said = greeting.encode()
    return said + proof_of(secret, "collective writer", challenge, said)


def assert_takes_writes(receiver: Mover, view: ByteRows) -> None:
    mine = np.random.default_rng(1).integers(0, 256, view.shape, np.uint8)
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    writer = Mover(CollectiveBackend(WRITER_PEER, Region.of(mine), MEETING), stopped.put)
    try:
        writer.attach(TARGET, receiver.describe())
        writer.write(TARGET, HANDOFF, EVERYTHING, EVERYTHING)
        assert stopped.get(timeout=20).event.digests is not None
        assert np.array_equal(view, mine)
    finally:
        writer.close()


def test_it_listens_on_the_loopback_interface_unless_told_otherwise(receiver: Mover) -> None:
    metadata = Description.decode(receiver.describe()).metadata
    assert metadata[REGION_BYTES:].startswith(b"127.0.0.1:")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda greeting, challenge: shown(greeting, challenge, b"x" * 32),
        lambda greeting, challenge: shown(greeting, bytes(NONCE_BYTES)),  # said at another time
        lambda greeting, challenge: shown(replace(greeting, region=bytes(REGION_BYTES)), challenge),
        lambda greeting, challenge: shown(replace(greeting, peer=NAMELESS), challenge),
        lambda greeting, challenge: greeting.encode(),
        lambda greeting, challenge: MEETING.secret,
        lambda greeting, challenge: b"",
        lambda greeting, challenge: shown(greeting, challenge)[:-1],
        lambda greeting, challenge: shown(greeting, challenge) + b"\xff",
        lambda greeting, challenge: shown(greeting, challenge) + bytes(pairing.MAX_GREETING_BYTES),
    ],
)
def test_who_does_not_prove_the_secret_or_means_another_or_has_no_name_is_cut_off_and_others_are_served(
    receiver: Mover, view: ByteRows, spoil: Callable[[Greeting, bytes], bytes]
) -> None:
    stranger, greeting = connected(receiver)
    stranger.send(spoil(greeting, stranger.receive(NONCE_BYTES)))
    with pytest.raises(OSError, match=r"ended|reset"):
        stranger.receive(100)
    stranger.close()
    assert_takes_writes(receiver, view)


def test_a_page_that_is_not_there_ends_the_connection_before_anything_is_written(
    receiver: Mover, view: ByteRows
) -> None:
    hostile, greeting = connected(receiver)
    greet(hostile, MEETING.secret, greeting)
    group = meet(hostile, WRITER)
    hostile.send(np.array([1 << 20], ">u4").tobytes())
    with pytest.raises(OSError, match="ended"):
        hostile.receive(100)
    del group
    hostile.close()
    assert not view.any()
    assert_takes_writes(receiver, view)


@pytest.mark.parametrize("receiver", [False, True], ids=["in place", "staged"], indirect=True)
def test_words_that_make_no_sense_end_a_connection_and_others_are_served(receiver: Mover, view: ByteRows) -> None:
    stranger, greeting = connected(receiver)
    greet(stranger, MEETING.secret, greeting)
    meet(stranger, WRITER)
    stranger.send(b"odd")
    with pytest.raises(OSError, match="ended"):
        stranger.receive(100)
    stranger.close()
    assert_takes_writes(receiver, view)


def test_a_writer_sends_nothing_to_a_receiver_that_does_not_prove_the_secret() -> None:
    said = []

    def pretend() -> None:
        with listener.accept()[0] as raw:
            stranger = Framed(raw)
            stranger.send(bytes(NONCE_BYTES))
            said.append(stranger.receive(1000))
            stranger.send(bytes(PROOF_BYTES))
            said.append(raw.recv(1000))

    region = Region.of(np.ones((2, 4096), np.uint8))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pretending = threading.Thread(target=pretend)
        pretending.start()
        metadata = bytes(REGION_BYTES) + f"127.0.0.1:{listener.getsockname()[1]}".encode()
        writer = Mover(CollectiveBackend(WRITER_PEER, region, MEETING), lambda _: None)
        with pytest.raises(ProtocolError, match="does not know the cluster's secret"):
            writer.attach(TARGET, region.description(metadata).encode())
        pretending.join(10)
        writer.close()
    greeting, rest = said
    assert MEETING.secret not in greeting
    assert rest == b""


def test_strangers_that_say_nothing_keep_no_writer_out(
    receiver: Mover, view: ByteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "MAX_WRITERS", 4)
    with ExitStack() as strangers:
        for _ in range(6):
            stranger = strangers.enter_context(socket.create_connection(address_of(receiver), 5))
            assert len(stranger.recv(100)) > NONCE_BYTES  # it has been let as far as the challenge
        assert_takes_writes(receiver, view)


def test_writers_that_have_proved_themselves_make_no_room_for_others(
    receiver: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "MAX_WRITERS", 1)
    writer, greeting = connected(receiver)
    greet(writer, MEETING.secret, greeting)
    meet(writer, WRITER)
    with socket.create_connection(address_of(receiver), 5) as late:
        assert late.recv(100) == b""
    writer.send(np.array([0], ">u4").tobytes())  # is read: the connection stands
    writer.close()


def test_who_says_its_greeting_bit_by_bit_is_cut_off_when_the_time_for_all_of_it_is_over(
    receiver: Mover, view: ByteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "GREETING_TIMEOUT_S", 0.5)
    with socket.create_connection(address_of(receiver), 5) as slow:
        assert len(slow.recv(100)) > NONCE_BYTES
        slow.sendall((1000).to_bytes(4, "big"))
        num_said = 0
        while not select.select([slow], [], [], 0.1)[0]:  # the end of the connection
            slow.sendall(b"x")
            num_said += 1
            assert num_said < 100, "ten seconds later it is still there"
    assert_takes_writes(receiver, view)


def test_a_receiver_that_runs_out_of_files_takes_writers_again_when_there_are_some(
    receiver: Mover, view: ByteRows, caplog: pytest.LogCaptureFixture
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


def test_a_receiver_without_a_thread_for_a_writer_takes_writers_again_when_there_is_one(
    receiver: Mover, view: ByteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_no_writer(thread: threading.Thread) -> None:
        if thread.name.startswith("writer"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", start_no_writer)
        with socket.create_connection(address_of(receiver), 5) as refused:
            assert refused.recv(100) == b""
    assert_takes_writes(receiver, view)


def test_a_receiver_outlives_a_writer_that_is_killed_as_it_writes(receiver: Mover, view: ByteRows) -> None:
    command = [sys.executable, str(WRITER_PROCESS), receiver.describe().hex(), str(NUM_PAGES), str(PAGE_BYTES)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    writer.kill()
    writer.communicate()
    assert_takes_writes(receiver, view)


def test_a_mover_that_is_closed_while_a_copy_of_it_is_in_flight_listens_no_more(
    receiver: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_go_on = threading.Event(), threading.Event()

    def wait(rows: HostRows, indices: Rows, received: object) -> None:
        is_writing.set()
        assert may_go_on.wait(20)

    monkeypatch.setattr(HostRows, "write", wait)
    writer = Mover(
        CollectiveBackend(WRITER_PEER, Region.of(np.ones((2, PAGE_BYTES), np.uint8)), MEETING), lambda _: None
    )
    writer.attach(TARGET, receiver.describe())
    writer.write(TARGET, HANDOFF, EVERYTHING[:1], EVERYTHING[:1])
    assert is_writing.wait(20)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address_of(writer), 5)
    may_go_on.set()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # its connection is never closed
        del writer
        gc.collect()


def test_a_process_that_has_closed_its_movers_leaves_in_good_order() -> None:
    left = subprocess.run([sys.executable, str(LEAVING_PROCESS)], capture_output=True, text=True, check=False)
    assert (left.returncode, left.stderr) == (0, "")
