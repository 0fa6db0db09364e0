"""One stream to each process, from the first need to its end."""

from dataclasses import replace

from pdserve.errors import Refusal
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.dialling import (
    CONNECT_TIMEOUT_S,
    MAX_QUEUED,
    Answered,
    AttachMover,
    CanWrite,
    Close,
    Command,
    Dial,
    DialId,
    Dialling,
    Ended,
    Finish,
    Left,
    Received,
    Send,
    TimedOut,
)
from pdserve.kvtransfer.doors import Connect, Forget, ReceiverAttached, ReceiverLost, ReceiverMessage, ToReceiver
from pdserve.kvtransfer.greeting import HelloAck, Introduction
from pdserve.kvtransfer.sender import Quiesced, Taken
from pdserve.kvtransfer.session import HandoffKey, Peer

LAYOUT = KvLayout("w", 2, 2, 4, 4, "float32")
ME = Introduction(Peer(WorkerId("p0"), Incarnation(1)), LAYOUT)
D = Peer(WorkerId("d0"), Incarnation(2))
ACK = HelloAck(Introduction(D, LAYOUT), b"address")
KEY = HandoffKey(RequestId(bytes(16)), Attempt(0))
QUIESCED = Quiesced("late")
FIRST = DialId(1)


def dialled() -> Dialling:
    dialling = Dialling(ME)
    assert dialling.handle(Connect(D, "there")) == (Dial(FIRST, D, "there", CONNECT_TIMEOUT_S),)
    return dialling


def attached() -> Dialling:
    dialling = dialled()
    assert dialling.handle(Answered(FIRST, ACK)) == (AttachMover(FIRST, D, b"address"),)
    assert dialling.handle(CanWrite(FIRST)) == (ReceiverAttached(D),)
    return dialling


def lost(commands: tuple[Command, ...]) -> str:
    """Return why a stream was closed and reported as lost."""
    close, report = commands
    assert isinstance(close, Close)
    assert isinstance(report, ReceiverLost)
    return report.reason


def test_a_second_need_uses_the_stream_that_is_dialled_or_attached() -> None:
    assert dialled().handle(Connect(D, "there")) == ()
    assert attached().handle(Connect(D, "there")) == ()


def test_what_is_said_early_is_sent_once_the_stream_is_attached() -> None:
    dialling = dialled()
    assert dialling.handle(ToReceiver(D, KEY, QUIESCED)) == ()
    dialling.handle(Answered(FIRST, ACK))
    assert dialling.handle(CanWrite(FIRST)) == (ReceiverAttached(D), Send(FIRST, KEY, QUIESCED))
    assert dialling.handle(ToReceiver(D, KEY, QUIESCED)) == (Send(FIRST, KEY, QUIESCED),)


def test_what_the_other_process_says_is_reported_in_its_name() -> None:
    assert attached().handle(Received(FIRST, KEY, Taken())) == (ReceiverMessage(D, KEY, Taken()),)


def test_a_process_that_does_not_answer_in_time_is_lost() -> None:
    assert "within 2 s" in lost(dialled().handle(TimedOut(FIRST)))


def test_the_time_that_a_mover_takes_to_attach_is_not_the_other_processs() -> None:
    dialling = dialled()
    dialling.handle(Answered(FIRST, ACK))
    assert dialling.handle(TimedOut(FIRST)) == ()


def test_another_process_that_answers_is_refused() -> None:
    other = Introduction(replace_incarnation(D), LAYOUT)
    close, _ = dialled().handle(Answered(FIRST, replace(ACK, me=other)))
    assert close == Close(FIRST, Refusal.INCARNATION)


def replace_incarnation(peer: Peer) -> Peer:
    return Peer(peer.worker_id, Incarnation(peer.incarnation + 1))


def test_a_lost_stream_is_reported_once_and_dialled_again_at_the_next_need() -> None:
    dialling = attached()
    assert lost(dialling.handle(Ended(FIRST, "reset"))) == "reset"
    assert dialling.handle(Ended(FIRST, "late")) == ()
    assert dialling.handle(ToReceiver(D, KEY, QUIESCED)) == ()
    (again,) = dialling.handle(Connect(D, "there"))
    assert isinstance(again, Dial)
    assert again.dial != FIRST


def test_a_process_known_to_have_ended_is_cut_off_at_once() -> None:
    for dialling in (dialled(), attached()):
        assert lost(dialling.handle(Forget(D))) == "its process has ended"
        assert dialling.handle(CanWrite(FIRST)) == ()


def test_a_process_that_never_answers_has_a_bounded_queue() -> None:
    dialling = dialled()
    for _ in range(MAX_QUEUED):
        assert dialling.handle(ToReceiver(D, KEY, QUIESCED)) == ()
    assert "messages wait" in lost(dialling.handle(ToReceiver(D, KEY, QUIESCED)))


def test_a_process_that_leaves_says_what_is_queued_and_dials_no_more() -> None:
    dialling = dialled()
    dialling.handle(ToReceiver(D, KEY, QUIESCED))
    assert dialling.handle(Left()) == ()
    dialling.handle(Answered(FIRST, ACK))
    assert dialling.handle(CanWrite(FIRST)) == (ReceiverAttached(D), Send(FIRST, KEY, QUIESCED), Finish(FIRST))
    assert dialling.handle(Connect(replace_incarnation(D), "there")) == ()
    assert attached().handle(Left()) == (Finish(FIRST),)
