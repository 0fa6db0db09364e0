"""What a hostile peer says to a decode worker's core is refused by its kind, and changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from capsules import capsule
from lone_core import VOCAB, LoneCore, job, key_of

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, WorkerId
from pdserve.decode_worker import receiver
from pdserve.decode_worker.incoming import check_capsule
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Capsule, Commit, PagesLanded, Quiesced, Tail
from pdserve.protocol.sampling import SampledToken
from pdserve.worker.messages import Command, Progress

P = Peer(WorkerId("p0"), Incarnation(11))
JOB, KEY = job(1, 5), key_of(1)
CAPSULE = capsule(5, (0, 7))


class Worker(LoneCore):
    """A decode worker with one open grant."""

    def __init__(self, **rules: object) -> None:
        super().__init__(**rules)  # type: ignore[arg-type]
        self.handle(doors.SenderAttached(P))
        (self.grant,) = [c.message for c in self.place(JOB, source=P) if isinstance(c, doors.ToSender)]
        self.good = Commit(self.grant.capability, CAPSULE)
        self.landed = PagesLanded((1,) * len(self.grant.pages))

    def say(self, event: receiver.Event, peer: Peer = P, key: AttemptKey = KEY) -> list[Command]:
        return self.handle(doors.SenderMessage(peer, key, event))

    def state(self) -> tuple[object, ...]:
        pool = self.cache.pool
        return self.core.load(), pool.generations(map(PageId, range(16)))


FORGED: dict[PeerFault, Callable[[Commit], Commit]] = {
    PeerFault.CAPABILITY: lambda good: replace(good, capability=b"?" * 16),
    PeerFault.MALFORMED: lambda good: replace(good, capsule=capsule(6, (0, 7))),
}


@pytest.mark.parametrize("refusal", FORGED)
def test_a_forged_commit_is_refused_by_its_kind_and_changes_nothing(refusal: PeerFault) -> None:
    worker = Worker()
    assert any(isinstance(command, doors.CheckDigests) for command in worker.say(worker.landed))
    before = worker.state()
    with pytest.raises(ProtocolError) as refused:
        worker.say(FORGED[refusal](worker.good))
    assert refused.value.refusal is refusal
    assert worker.state() == before
    assert any(isinstance(outcome, Progress) for outcome in worker.say(worker.good))


def test_more_pages_than_were_granted_cannot_have_landed() -> None:
    worker = Worker()
    before = worker.state()
    with pytest.raises(ProtocolError, match="3 for 2 pages"):
        worker.say(PagesLanded((1, 1, 1)))
    assert worker.state() == before


def test_a_commit_of_more_pages_than_have_landed_is_refused() -> None:
    worker = Worker()
    worker.say(PagesLanded((1,)))
    with pytest.raises(ProtocolError, match="need 2 pages, 1 have landed"):
        worker.say(worker.good)


def tail(index: int, *token_ids: int) -> Tail:
    return Tail(index, tuple(map(SampledToken, token_ids)))


@pytest.mark.parametrize(
    ("capsule", "why"),
    [
        (Capsule(5, ()), "no continuation"),
        (Capsule(5, (tail(1, 7),)), "not the continuations"),
        (Capsule(5, (tail(0, VOCAB),)), "vocabulary"),
        (Capsule(6, (tail(0, VOCAB, 7),)), "vocabulary"),
        (Capsule(4, (tail(0, 7),)), "4 tokens for 5"),
        (Capsule(5, (tail(0, 7, 8),)), "5 tokens for 6"),
        (Capsule(6, (tail(0, 7, 8), tail(2, 8, 8))), "share pages"),
        (Capsule(6, (tail(0, 7, 8), tail(2, 8))), "share pages"),
    ],
)
def test_a_capsule_that_does_not_fit_the_job_is_refused(capsule: Capsule, why: str) -> None:
    both = replace(JOB, indices=(0, 2))
    check_capsule(both, Capsule(6, (tail(0, 7, 8), tail(2, 7, 9))), VOCAB)
    with pytest.raises(ProtocolError, match=why):
        check_capsule(both, capsule, VOCAB)


@pytest.mark.parametrize("peer", [Peer(P.worker_id, Incarnation(10)), Peer(WorkerId("p1"), P.incarnation)])
@pytest.mark.parametrize("quiesced", [False, True], ids=["commit", "quiesced"])
def test_another_process_cannot_speak_for_a_hand_off(peer: Peer, quiesced: bool) -> None:
    worker = Worker()
    before = worker.state()
    with pytest.raises(ProtocolError) as refused:
        worker.say(Quiesced("q") if quiesced else worker.good, peer)
    assert refused.value.refusal is PeerFault.INCARNATION
    assert worker.state() == before


def test_a_commit_shown_again_after_its_hand_off_has_ended_changes_nothing() -> None:
    worker = Worker()
    worker.say(worker.landed)
    worker.say(worker.good)
    with pytest.raises(ProtocolError) as refused:
        worker.say(worker.good)
    assert refused.value.refusal is PeerFault.ORDER
    worker.handle(doors.DigestsChecked(KEY, None))
    before = worker.state()
    assert worker.say(worker.good) == []
    assert worker.say(worker.good, key=AttemptKey(KEY.request_id, Attempt(1))) == []
    assert worker.state() == before


def test_with_digests_off_a_commit_joins_the_batch_at_once() -> None:
    worker = Worker(checks_digests=False)
    assert worker.say(worker.landed) == []
    commands = worker.say(worker.good)
    assert [c.stage.name for c in commands if isinstance(c, Progress)] == ["LANDED", "COMMITTED"]
    assert not any(isinstance(command, doors.CheckDigests) for command in commands)
    assert worker.core.load().num_running == 1
