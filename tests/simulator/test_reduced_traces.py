"""What the simulator found in the cores, each told by the few events that matter."""

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.errors import ProtocolError
from pdserve.ids import Attempt, Generation, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.session import Capsule, Commit, Grant, HandoffKey, Peer, Quiesced
from pdserve.prefill_worker.early_grants import EARLY_GRANT_S
from pdserve.reports import Failure
from pdserve.roles import Role
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Command, Event, Failed, Placed, RouterRef, Ticked

PAGE_SIZE = 4
VOCAB = 997
P, D = Peer(WorkerId("p0"), Incarnation(11)), Peer(WorkerId("d0"), Incarnation(22))

RULES = default_rules(max_tasks=64, role=Role.PREFILL)


def job(number: int, num_tokens: int, n: int = 1) -> Job:
    params = SamplingParams(max_tokens=8, n=n)
    prompt = tuple(range(num_tokens))
    return Job(RequestId(number.to_bytes(16)), Attempt(0), prompt, num_tokens, params, tuple(range(n)))


def key(job: Job) -> HandoffKey:
    return HandoffKey(job.request_id, job.attempt)


def scheduler(num_pages: int, max_model_len: int) -> Scheduler:
    limits = Limits(8, 64, max_model_len, frozenset())
    return Scheduler(KvCache(num_pages, PAGE_SIZE, None), limits)


class Prefill:
    """A prefill worker's core with an engine under it."""

    def __init__(self, num_pages: int = 32, max_model_len: int = 32) -> None:
        self.core = WorkerCore(scheduler(num_pages, max_model_len), VOCAB, 16, b"secret", RULES)
        self.runner = FakeRunner(num_pages, PAGE_SIZE, VOCAB)

    def handle(self, event: Event, now_s: float = 0.0) -> list[Command]:
        return self.core.handle(event, now_s)

    def place(self, job: Job) -> list[Command]:
        return self.handle(Placed(RouterRef(1), job, 1e9, target=D, target_address="there"))

    def compute(self) -> list[Command]:
        """Run steps until there is nothing to compute."""
        commands: list[Command] = []
        while (plan := self.core.plan(0.0)) is not None:
            commands += self.core.commit(plan, self.runner.run(plan), 0.0)
        return commands


def test_continuations_cancelled_one_by_one_leave_nothing_on_a_prefill_worker() -> None:
    worker, both = Prefill(), job(1, 10, n=2)
    worker.place(both)
    worker.compute()
    worker.handle(Cancelled(both.request_id, both.attempt, (0,)))
    assert not worker.core.idle
    worker.handle(Cancelled(both.request_id, both.attempt, (1,)))
    assert worker.core.idle


def test_a_placement_whose_grant_was_given_back_fails_at_once() -> None:
    worker, late = Prefill(), job(1, 4)
    grant = Grant(0, (PageId(0),), (Generation(1),), b"", 4.0)
    worker.handle(doors.ReceiverSaid(D, key(late), grant))
    (answer,) = worker.handle(Ticked(), EARLY_GRANT_S + 1.0)
    assert isinstance(answer, doors.ToReceiver)
    assert isinstance(answer.message, Quiesced)
    (failed,) = worker.place(late)
    assert isinstance(failed, Failed)
    assert failed.code is Failure.PEER_LOST
    assert worker.core.idle


def test_prompts_that_wait_for_grants_leave_room_for_one_that_has_its_own() -> None:
    worker = Prefill(num_pages=12, max_model_len=32)
    for number in range(1, 6):
        worker.place(job(number, 16))
    worker.compute()
    granted = job(5, 16)
    grant = Grant(0, tuple(map(PageId, range(4))), (Generation(1),) * 4, b"", 4.0)
    worker.handle(doors.ReceiverSaid(D, key(granted), grant))
    copies = [command for command in worker.compute() if isinstance(command, doors.Copy)]
    assert [copy.key for copy in copies] == [key(granted)]


def test_a_granted_prompt_starts_where_the_longest_prompt_would_not_fit() -> None:
    worker, granted = Prefill(num_pages=6, max_model_len=32), job(1, 8)
    worker.place(granted)
    assert worker.compute() == []
    grant = Grant(0, tuple(map(PageId, range(2))), (Generation(1),) * 2, b"", 4.0)
    worker.handle(doors.ReceiverSaid(D, key(granted), grant))
    assert any(isinstance(command, doors.Copy) for command in worker.compute())


def test_a_lost_peer_is_dialled_again_until_its_process_is_known_to_have_ended() -> None:
    worker = Prefill()
    worker.place(job(1, 4))
    for tick in range(3):
        worker.handle(doors.ReceiverLost(D, "reset"), float(tick))
        assert doors.Connect(D, "there") in worker.handle(Ticked(), float(tick))
    worker.handle(doors.ReceiverLost(D, "reset"), 4.0)
    worker.handle(PeerGone(D), 4.0)
    assert worker.handle(Ticked(), 5.0) == []


def test_a_capsule_without_tokens_is_refused_and_changes_nothing() -> None:
    core = WorkerCore(scheduler(32, 32), VOCAB, 64, b"secret", default_rules())
    wanted = job(1, 4)
    core.handle(doors.SenderAttached(P), 0.0)
    commands = core.handle(Placed(RouterRef(1), wanted, 1e9, P), 0.0)
    told = [command.message for command in commands if isinstance(command, doors.ToSender)]
    (grant,) = [message for message in told if isinstance(message, Grant)]
    before = core.load()
    empty = Commit.of(grant, Capsule(4, ()))
    with pytest.raises(ProtocolError, match="capsule"):
        core.handle(doors.SenderSaid(P, key(wanted), empty), 0.0)
    assert core.load() == before
