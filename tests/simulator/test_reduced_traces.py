"""What the simulator found in the cores, each told by the few events that matter."""

import pytest
from lone_core import LoneCore, grant, job, key_of

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.base.roles import Role
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.session import Capsule, Commit, Grant, Quiesced
from pdserve.prefill_worker.outgoing import EARLY_GRANT_S
from pdserve.protocol.reports import Failure
from pdserve.worker.messages import Cancelled, Failed, Ticked

P, D = Peer(WorkerId("p0"), Incarnation(11)), Peer(WorkerId("d0"), Incarnation(22))


def prefill(num_pages: int = 32) -> LoneCore:
    return LoneCore(num_pages, max_model_len=32, role=Role.PREFILL)


def test_continuations_cancelled_one_by_one_leave_nothing_on_a_prefill_worker() -> None:
    worker, both = prefill(), job(1, 10, n=2)
    worker.place(both, target=D)
    worker.compute()
    worker.handle(Cancelled(both.request_id, both.attempt, (0,)))
    assert not worker.core.idle
    worker.handle(Cancelled(both.request_id, both.attempt, (1,)))
    assert worker.core.idle


def test_a_placement_whose_grant_was_given_back_fails_at_once() -> None:
    worker = prefill()
    worker.hear(D, 1, grant(1))
    (answer,) = worker.core.handle(Ticked(), EARLY_GRANT_S + 1.0)
    assert isinstance(answer, doors.ToReceiver)
    assert isinstance(answer.message, Quiesced)
    (failed,) = worker.place(job(1, 4), target=D)
    assert isinstance(failed, Failed)
    assert failed.code is Failure.PEER_LOST
    assert worker.core.idle


def test_prompts_that_wait_for_grants_leave_room_for_one_that_has_its_own() -> None:
    worker = prefill(num_pages=12)
    for number in range(1, 6):
        worker.place(job(number, 16), target=D)
    worker.compute()
    worker.hear(D, 5, grant(4))
    copies = [command for command in worker.compute() if isinstance(command, doors.StartCopy)]
    assert [copy.key for copy in copies] == [key_of(5)]


def test_a_granted_prompt_starts_where_the_longest_prompt_would_not_fit() -> None:
    worker = prefill(num_pages=6)
    worker.place(job(1, 8), target=D)
    assert worker.compute() == []
    worker.hear(D, 1, grant(2))
    assert any(isinstance(command, doors.StartCopy) for command in worker.compute())


def test_a_lost_peer_is_dialled_again_until_its_process_is_known_to_have_ended() -> None:
    worker = prefill()
    worker.place(job(1, 4), target=D)
    for _ in range(3):
        worker.handle(doors.ReceiverLost(D, "reset"))
        assert doors.Connect(D, "host:1") in worker.handle(Ticked())
    worker.handle(doors.ReceiverLost(D, "reset"))
    worker.handle(PeerGone(D))
    assert worker.handle(Ticked()) == []


def test_a_capsule_without_tokens_is_refused_and_changes_nothing() -> None:
    worker = LoneCore()
    worker.handle(doors.SenderAttached(P))
    commands = worker.place(job(1, 4), source=P)
    (granted,) = [command.message for command in commands if isinstance(command, doors.ToSender)]
    assert isinstance(granted, Grant)
    before = worker.core.load()
    with pytest.raises(ProtocolError, match="capsule"):
        worker.handle(doors.SenderMessage(P, key_of(1), Commit(granted.capability, Capsule(4, ()))))
    assert worker.core.load() == before
