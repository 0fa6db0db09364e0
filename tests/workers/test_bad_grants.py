"""A prefill worker is granted what its prompt cannot use: that costs this hand-off alone."""

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.errors import ProtocolError, Refusal
from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer.doors import Connect, Copy, ReceiverSaid
from pdserve.kvtransfer.session import Grant, HandoffKey, Peer, Taken
from pdserve.reports import Failure
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Command, Failed, Placed, RouterRef

PAGE_SIZE, NUM_PAGES, VOCAB = 4, 32, 100
D = Peer(WorkerId("d0"), Incarnation(1))
OTHER = Peer(WorkerId("d1"), Incarnation(1))


class Worker:
    """A prefill core with an engine."""

    def __init__(self) -> None:
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, eos_token_ids=frozenset())
        self.scheduler = Scheduler(KvCache(NUM_PAGES, PAGE_SIZE, None), limits)
        self.runner = FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB)
        self.core = WorkerCore(self.scheduler, VOCAB, self.runner.page_bytes, b"secret", default_rules(max_tasks=8))

    def place(self, number: int, num_tokens: int) -> list[Command]:
        key = key_of(number)
        tokens = tuple(range(num_tokens))
        job = Job(key.request_id, key.attempt, tokens, num_tokens, SamplingParams(max_tokens=4), (0,))
        return self.core.handle(Placed(RouterRef(1), job, 1e9, target=D, target_address="host:1"), 0.0)

    def grant(self, number: int, num_pages: int, *, region: int = 0, peer: Peer = D) -> list[Command]:
        pages = tuple(map(PageId, range(num_pages)))
        grant = Grant(0, pages, (1,) * num_pages, bytes(16), 4.0, region)
        return self.core.handle(ReceiverSaid(peer, key_of(number), grant), 0.0)

    def step(self) -> list[Command]:
        plan = self.core.plan(0.0)
        assert plan is not None
        return self.core.commit(plan, self.runner.run(plan), 0.0)


def key_of(number: int) -> HandoffKey:
    return HandoffKey(RequestId(number.to_bytes(16)), Attempt(0))


def of(kind: type, commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_grant_of_too_few_pages_fails_its_hand_off_in_the_step_that_ends_the_prompt(worker: Worker) -> None:
    worker.place(1, 12)
    worker.place(2, 12)
    worker.grant(1, 2)
    worker.grant(2, 3)
    commands = worker.step()
    (failed,) = of(Failed, commands)
    assert isinstance(failed, Failed)
    assert (failed.key, failed.code) == (key_of(1), Failure.TRANSFER_FAILED)
    (copy,) = of(Copy, commands)
    assert isinstance(copy, Copy)
    assert copy.key == key_of(2)
    pool = worker.scheduler.cache.pool
    assert pool.num_free == pool.num_pages - 3


def test_an_early_grant_that_cannot_be_used_is_refused_when_it_comes_and_its_placement_dials_all_the_same(
    worker: Worker,
) -> None:
    with pytest.raises(ProtocolError, match="region: 7") as refused:
        worker.grant(1, 3, region=7)
    assert refused.value.refusal is Refusal.REGION
    assert of(Connect, worker.place(1, 12)) == [Connect(D, "host:1")]
    worker.grant(1, 3)
    assert of(Copy, worker.step())


def test_an_early_grant_of_another_peer_does_not_take_the_place_of_the_right_one(worker: Worker) -> None:
    worker.grant(1, 3)
    worker.grant(1, 1, peer=OTHER)
    worker.place(1, 12)
    (copy,) = of(Copy, worker.step())
    assert isinstance(copy, Copy)
    assert copy.peer == D
    assert len(copy.dst) == 3


def test_a_word_of_taking_what_was_never_sent_does_not_lose_an_early_grant(worker: Worker) -> None:
    worker.grant(1, 3)
    worker.core.handle(ReceiverSaid(D, key_of(1), Taken()), 0.0)
    worker.place(1, 12)
    assert len(of(Copy, worker.step())) == 1
