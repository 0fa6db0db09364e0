"""One worker through whose doors KV leaves and arrives at once; what becomes of both with a request, or a peer."""

import pytest
from capsules import capsule
from lone_core import VOCAB, LoneCore, grant, job, key_of

from faultsim.engine import EMPTY, chain, expected
from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Capsule, Commit, Grant, HandoffKey, PagesLanded, Peer, Tail, Taken
from pdserve.reports import Failure, Stage
from pdserve.sampling import SampledToken
from pdserve.worker.admission import Draining
from pdserve.worker.messages import (
    Cancelled,
    Command,
    DrainAsked,
    DrainCancelled,
    Failed,
    Progress,
    Tokens,
)

NUM_PAGES = 32
PEER = Peer(WorkerId("other"), Incarnation(3))
PROMPT = tuple(range(10))  # three pages
LEAVES, ARRIVES, STAYS = map(key_of, (1, 2, 3))


class Worker(LoneCore):
    """A core that is attached to a peer, which is both a receiver and a sender."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES)
        self.handle(doors.SenderAttached(PEER))
        self.handle(doors.ReceiverAttached(PEER))

    def arrive(self, max_tokens: int = 3) -> Grant:
        """Place a request that is to arrive; return what is granted for it."""
        commands = self.place(job(2, len(PROMPT), max_tokens), source=PEER)
        (grant,) = [c.message for c in commands if isinstance(c, doors.ToSender)]
        return grant

    def leave(self) -> None:
        self.place(job(1, len(PROMPT), max_tokens=3), target=PEER)

    def stay(self) -> list[Command]:
        return self.place(job(3, len(PROMPT), max_tokens=3))

    def grant(self) -> None:
        """Let the receiver grant room for what leaves."""
        self.hear(PEER, 1, grant(3))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def keys_of(kind: type[Tokens] | type[Failed], commands: list[Command]) -> list[HandoffKey]:
    return [command.key for command in commands if isinstance(command, kind)]


def test_prompts_leave_arrive_and_stay_in_one_batch(worker: Worker) -> None:
    grant = worker.arrive()
    worker.leave()
    worker.stay()
    worker.grant()
    assert sorted(keys_of(Tokens, worker.step())) == [LEAVES, STAYS]
    commit = Commit(grant.capability, capsule(len(PROMPT), (0, 7)))
    worker.handle(doors.SenderMessage(PEER, ARRIVES, PagesLanded((0,) * len(grant.pages))))
    worker.handle(doors.SenderMessage(PEER, ARRIVES, commit))
    arrived = worker.handle(doors.DigestsChecked(ARRIVES, None))
    assert keys_of(Tokens, arrived) == [ARRIVES], "with its first token, which the sender has reported too"
    assert sorted(keys_of(Tokens, worker.step())) == [ARRIVES, STAYS]
    assert sorted(keys_of(Tokens, worker.step())) == [ARRIVES, STAYS]
    worker.hear(PEER, 1, doors.CopyStopped((1, 2, 3)))
    worker.hear(PEER, 1, Taken())
    assert worker.core.idle
    assert worker.cache.pool.num_free == NUM_PAGES


def test_a_sequence_goes_on_after_the_tail_that_came_with_its_pages(worker: Worker) -> None:
    tokens = expected(PROMPT, 0, 6, VOCAB)
    grant = worker.arrive(max_tokens=6)
    written = chain(EMPTY, [*PROMPT, *tokens[:2]])
    for number, page in enumerate(grant.pages):
        part = written[number * worker.runner.page_bytes : (number + 1) * worker.runner.page_bytes]
        worker.runner.page(page)[: len(part)] = part
    tail = Tail(0, tuple(map(SampledToken, tokens[:3])))
    commit = Commit(grant.capability, Capsule(len(PROMPT) + 2, (tail,)))
    worker.handle(doors.SenderMessage(PEER, ARRIVES, PagesLanded((0,) * len(grant.pages))))
    worker.handle(doors.SenderMessage(PEER, ARRIVES, commit))
    commands = worker.handle(doors.DigestsChecked(ARRIVES, None))
    for _ in range(3):
        commands += worker.step()
    committed, *reports = [c for c in commands if isinstance(c, Tokens | Progress) and c.key == ARRIVES]
    assert isinstance(committed, Progress)
    assert committed.stage is Stage.COMMITTED
    sampled = [(each.position, each.token.token_id) for each in reports if isinstance(each, Tokens)]
    assert sampled == list(enumerate(tokens))
    assert worker.core.idle


def test_a_process_that_has_ended_closes_both_doors_to_it_and_is_forgotten_once(worker: Worker) -> None:
    worker.arrive()
    worker.leave()
    worker.stay()
    worker.grant()
    worker.step()
    commands = worker.handle(doors.PeerGone(PEER))
    assert sorted(keys_of(Failed, commands)) == [LEAVES, ARRIVES]
    assert {c.code for c in commands if isinstance(c, Failed)} == {Failure.PEER_LOST}
    assert commands[-1] == doors.Forget(PEER)
    assert commands.count(doors.Forget(PEER)) == 1
    assert worker.core.load().pages_granted == 0
    worker.hear(PEER, 1, doors.CopyStopped(None, "its process ended"))
    assert worker.core.load().pages_held == 3, "of the request that stays"


def test_a_request_cancelled_in_mid_copy_is_over_at_once_and_its_pages_are_held_until_the_copy_stops(
    worker: Worker,
) -> None:
    worker.leave()
    worker.grant()
    assert any(isinstance(command, doors.StartCopy) for command in worker.step())
    commands = worker.handle(Cancelled(LEAVES.request_id, LEAVES.attempt))
    assert doors.CancelCopies(PEER, LEAVES) in commands
    worker.handle(DrainAsked())
    assert worker.core.load().pages_held == 3
    assert not worker.core.drained
    worker.hear(PEER, 1, doors.CopyStopped(None, "cancelled"))
    assert worker.cache.pool.num_free == NUM_PAGES
    assert worker.core.drained


def test_a_worker_that_drains_takes_work_again_unless_a_signal_came_or_it_drains_by_itself(worker: Worker) -> None:
    worker.leave()
    worker.handle(DrainAsked())
    assert keys_of(Failed, worker.stay()) == [STAYS]
    worker.handle(DrainCancelled())
    assert not worker.core.load().draining
    assert keys_of(Failed, worker.stay()) == []
    worker.handle(DrainAsked(is_final=True))
    worker.handle(DrainAsked())
    worker.handle(DrainCancelled())
    assert worker.core.load().draining
    draining = Draining(max_quarantined_share=0.5)
    while not draining.look(num_quarantined=6, num_pages=10):
        pass
    draining.take(DrainCancelled())
    assert draining.is_on
