"""A peer is cut off by what it leaves unread, however little that is at a time, or by its silence, on real sockets."""

import socket
from collections.abc import Iterator

import pytest

from pdserve.router.frontend.openai.connection import INFO, STALLED_S, Peer

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listener.getsockname())
        writer, _ = listener.accept()
        with writer:
            writer.settimeout(5)
            yield writer, reader


def fill(writer: socket.socket) -> int:
    """Write until the reader's kernel and this one hold all that they can; return how much that is."""
    writer.setblocking(False)
    num_bytes = 0
    try:
        while True:
            num_bytes += writer.send(bytes(65536))
    except BlockingIOError:
        writer.settimeout(5)
        return num_bytes


def test_a_reader_that_takes_nothing_stalls(ends: Ends) -> None:
    writer, _ = ends
    peer = Peer(writer, 0.0)
    assert peer.reads(1000.0)
    fill(writer)
    assert peer.reads(2000.0)
    assert not peer.has_all
    assert peer.reads(2000.0 + STALLED_S - 1)
    assert not peer.reads(2000.0 + STALLED_S)


def test_a_reader_that_takes_some_of_it_now_and_then_lives(ends: Ends) -> None:
    writer, reader = ends
    peer = Peer(writer, 0.0)
    num_waiting = fill(writer)
    for look in range(1, 4):
        assert peer.reads(look * (STALLED_S - 1))
        for _ in range(num_waiting // 4 // 1024):
            num_waiting -= len(reader.recv(1024, socket.MSG_WAITALL))
    assert not peer.has_all
    while num_waiting:
        num_waiting -= len(reader.recv(num_waiting))
    assert peer.reads(10 * STALLED_S)
    assert peer.has_all


def test_nobody_reads_behind_a_socket_that_is_closed(ends: Ends) -> None:
    writer, _ = ends
    peer = Peer(writer, 0.0)
    writer.close()
    assert not peer.reads(1.0)


class Seen(socket.socket):
    """What a kernel says of a connection, which no test can bring about in a short time."""

    info = b""

    def getsockopt(self, *asked: int) -> bytes:  # type: ignore[override]
        del asked
        return self.info


@pytest.mark.parametrize(
    ("num_sent_again", "num_probes", "silent_ms", "reads"),
    [(7, 0, 31_000, False), (0, 2, 31_000, False), (1, 0, 31_000, True), (7, 0, 29_000, True), (0, 0, 99_000, True)],
)
def test_a_peer_that_answers_neither_data_nor_probes_is_gone(
    num_sent_again: int, num_probes: int, silent_ms: int, reads: bool
) -> None:
    with Seen() as tcp:
        tcp.info = INFO.pack(num_sent_again, num_probes, silent_ms, 0, 0)
        assert Peer(tcp, 0.0).reads(1.0) is reads
