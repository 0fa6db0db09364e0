"""Whom each end of a hand-off stream takes for somebody it can work with."""

from dataclasses import replace

import pytest

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.session import Hello, HelloAck, Introduction, check_ack, check_hello
from pdserve.protocol.kvlayout import KvLayout

LAYOUT = KvLayout("w", 2, 2, 4, 4, "float32")
SENDER = Introduction(Peer(WorkerId("p0"), Incarnation(1)), LAYOUT)
RECEIVER = Introduction(Peer(WorkerId("d0"), Incarnation(2)), LAYOUT)
HELLO = Hello(SENDER, "loopback", RECEIVER.peer.incarnation, 0.0)
OTHER_LAYOUT = replace(LAYOUT, num_layers=3)


def refusal_of_hello(**changes: object) -> PeerFault | None:
    try:
        check_hello(replace(HELLO, **changes), RECEIVER, "loopback")  # type: ignore[arg-type]
    except ProtocolError as error:
        return error.refusal
    return None


def test_who_fits_is_greeted() -> None:
    assert refusal_of_hello() is None
    check_ack(HelloAck(RECEIVER, b""), SENDER, RECEIVER.peer)


def test_who_means_another_incarnation_is_refused() -> None:
    assert refusal_of_hello(decode_incarnation=Incarnation(3)) is PeerFault.INCARNATION


def test_who_lays_out_pages_otherwise_is_refused_at_both_ends() -> None:
    assert refusal_of_hello(me=replace(SENDER, layout=OTHER_LAYOUT)) is PeerFault.LAYOUT
    with pytest.raises(ProtocolError, match=r"layout.num_layers"):
        check_ack(HelloAck(replace(RECEIVER, layout=OTHER_LAYOUT), b""), SENDER, RECEIVER.peer)


def test_who_uses_another_mover_is_refused() -> None:
    assert refusal_of_hello(mover="nixl") is PeerFault.MOVER


def test_another_process_than_the_one_dialled_is_refused() -> None:
    later = Peer(RECEIVER.peer.worker_id, Incarnation(9))
    with pytest.raises(ProtocolError, match="answers for"):
        check_ack(HelloAck(replace(RECEIVER, peer=later), b""), SENDER, RECEIVER.peer)
