"""One stream to each process, from the first need to its end."""

from dataclasses import replace

import pytest

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.kvtransfer.dialling import MAX_QUEUED, Close, Command, Dial, DialId, Dialling, Finish, Send
from pdserve.kvtransfer.doors import ReceiverAttached, ReceiverLost
from pdserve.kvtransfer.session import HelloAck, Introduction, Quiesced
from pdserve.protocol.kvlayout import KvLayout

LAYOUT = KvLayout("w", 2, 2, 4, 4, "float32")
ME = Introduction(Peer(WorkerId("p0"), Incarnation(1)), LAYOUT)
D = Peer(WorkerId("d0"), Incarnation(2))
ACK = HelloAck(Introduction(D, LAYOUT), b"address")
KEY = AttemptKey(RequestId(bytes(16)), Attempt(0))
QUIESCED = Quiesced("late")
FIRST = DialId(1)


def dialled() -> Dialling:
    dialling = Dialling(ME)
    assert dialling.connect(D, "there") == [Dial(FIRST, D, "there")]
    return dialling


def attached() -> Dialling:
    dialling = dialled()
    dialling.answer(FIRST, ACK)
    assert dialling.attach(FIRST) == [ReceiverAttached(D)]
    return dialling


def lost(commands: list[Command]) -> str:
    """Return why a stream was closed and reported as lost."""
    close, report = commands
    assert isinstance(close, Close)
    assert isinstance(report, ReceiverLost)
    return report.reason


def test_a_second_need_uses_the_stream_that_is_dialled_or_attached() -> None:
    assert dialled().connect(D, "there") == []
    assert attached().connect(D, "there") == []


def test_what_is_said_early_is_sent_once_the_stream_is_attached() -> None:
    dialling = dialled()
    assert dialling.send(D, KEY, QUIESCED) == []
    dialling.answer(FIRST, ACK)
    assert dialling.attach(FIRST) == [ReceiverAttached(D), Send(FIRST, KEY, QUIESCED)]
    assert dialling.send(D, KEY, QUIESCED) == [Send(FIRST, KEY, QUIESCED)]


def test_a_process_that_does_not_answer_in_time_is_lost() -> None:
    assert "within 2 s" in lost(dialled().time_out(FIRST))


def test_the_time_that_a_mover_takes_to_attach_is_not_the_other_processs() -> None:
    dialling = dialled()
    dialling.answer(FIRST, ACK)
    assert dialling.time_out(FIRST) == []


def test_another_process_that_answers_is_refused() -> None:
    other = Introduction(replace_incarnation(D), LAYOUT)
    with pytest.raises(ProtocolError) as refused:
        dialled().answer(FIRST, replace(ACK, me=other))
    assert refused.value.refusal is PeerFault.INCARNATION


def replace_incarnation(peer: Peer) -> Peer:
    return Peer(peer.worker_id, Incarnation(peer.incarnation + 1))


def test_a_lost_stream_is_reported_once_and_dialled_again_at_the_next_need() -> None:
    dialling = attached()
    assert lost(dialling.end(FIRST, "reset")) == "reset"
    assert dialling.end(FIRST, "late") == []
    assert dialling.send(D, KEY, QUIESCED) == []
    (again,) = dialling.connect(D, "there")
    assert isinstance(again, Dial)
    assert again.dial != FIRST


def test_a_process_known_to_have_ended_is_cut_off_at_once() -> None:
    for dialling in (dialled(), attached()):
        assert lost(dialling.forget(D)) == "its process has ended"
        assert dialling.attach(FIRST) == []


def test_a_process_that_never_answers_has_a_bounded_queue() -> None:
    dialling = dialled()
    for _ in range(MAX_QUEUED):
        assert dialling.send(D, KEY, QUIESCED) == []
    assert "messages wait" in lost(dialling.send(D, KEY, QUIESCED))


def test_a_process_that_leaves_says_what_is_queued_and_dials_no_more() -> None:
    dialling = dialled()
    dialling.send(D, KEY, QUIESCED)
    assert dialling.leave() == []
    dialling.answer(FIRST, ACK)
    assert dialling.attach(FIRST) == [ReceiverAttached(D), Send(FIRST, KEY, QUIESCED), Finish(FIRST)]
    assert dialling.connect(replace_incarnation(D), "there") == []
    assert attached().leave() == [Finish(FIRST)]
