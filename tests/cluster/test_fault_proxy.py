"""The proxy that tests put between processes does what it says."""

import socket
import time
from collections.abc import Iterator

import pytest
from fault_proxy import FaultProxy, Faults, fault_proxies
from grpc_frames import PREFACE

DATA = bytes(range(256)) * 40


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with fault_proxies("p") as proxies:
        yield proxies["p"]


@pytest.fixture
def ends(proxy: FaultProxy) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection through the proxy: who dialled, and who was dialled."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy.target = server.getsockname()
        host, port = proxy.address.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as caller:
            called, _ = server.accept()
            called.settimeout(5)
            with called:
                yield caller, called


def receive(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


Ends = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("faults", [Faults(), Faults(slice_bytes=7), Faults(latency_s=0.01, bytes_per_s=1e6)])
def test_what_is_said_arrives_whole_and_in_order_both_ways(proxy: FaultProxy, ends: Ends, faults: Faults) -> None:
    proxy.set(faults)
    for source, target in (ends, ends[::-1]):
        source.sendall(DATA)
        assert receive(target, len(DATA)) == DATA


def test_the_end_of_one_side_is_the_end_of_the_other(ends: Ends) -> None:
    caller, called = ends
    caller.shutdown(socket.SHUT_WR)
    assert called.recv(1) == b""


def test_latency_is_the_time_on_the_way_and_not_between_two_words(proxy: FaultProxy, ends: Ends) -> None:
    proxy.set(Faults(latency_s=0.5))
    started_s = time.monotonic()
    for _ in range(80):
        ends[0].sendall(b"word")
        ends[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert receive(ends[1], 320) == b"word" * 80
    assert 0.5 <= time.monotonic() - started_s < 20  # one after the other, they would take 40 s


def test_one_bit_in_so_many_bytes_is_turned(proxy: FaultProxy, ends: Ends) -> None:
    proxy.set(Faults(corrupt_every=1000, slice_bytes=300))
    ends[0].sendall(DATA)
    arrived = receive(ends[1], len(DATA))
    assert [i for i, (sent, got) in enumerate(zip(DATA, arrived, strict=True)) if sent != got] == list(
        range(0, len(DATA), 1000)
    )


def test_a_blackhole_holds_everything_back_until_it_heals(proxy: FaultProxy, ends: Ends) -> None:
    ends[1].settimeout(0.3)
    with proxy.having(Faults(blackhole=True)):
        ends[0].sendall(b"held")
        with pytest.raises(TimeoutError):
            ends[1].recv(4)
    assert receive(ends[1], 4) == b"held"


def test_a_reset_is_seen_by_both_ends(proxy: FaultProxy, ends: Ends) -> None:
    ends[0].sendall(b"x")
    receive(ends[1], 1)
    proxy.reset()
    for end in ends:
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def data_frame(*messages: bytes) -> bytes:
    """Return gRPC messages as one HTTP/2 frame of a stream."""
    payload = b"".join(b"\0" + len(message).to_bytes(4) + message for message in messages)
    return len(payload).to_bytes(3) + b"\0\0" + (1).to_bytes(4) + payload


def test_a_message_that_is_wanted_is_held_with_all_that_follows_and_nothing_before_it(
    proxy: FaultProxy, ends: Ends
) -> None:
    before = PREFACE + data_frame(b"one", b"two") + data_frame(b"three")
    after = data_frame(b"four") + data_frame(b"five")
    ends[1].settimeout(0.3)
    with proxy.holding("onward", lambda message: message == b"four") as gate:
        whole = before + after
        for piece in (whole[:30], whole[30:45], whole[45:]):
            ends[0].sendall(piece)
        gate.wait_until_caught()
        assert receive(ends[1], len(before)) == before
        with pytest.raises(TimeoutError):
            ends[1].recv(1)
        ends[1].sendall(DATA)
        assert receive(ends[0], len(DATA)) == DATA  # the other way goes on
    assert receive(ends[1], len(after)) == after
