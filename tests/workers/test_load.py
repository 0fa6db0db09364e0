"""What a worker reports of its load adds up over the routers that sent it, and its counts never fall."""

from dataclasses import replace

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.errors import Refusal
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer.doors import SenderSaid
from pdserve.kvtransfer.receiver import Quiesced
from pdserve.kvtransfer.session import DigestPolicy, HandoffKey, Peer
from pdserve.load import LoadPart
from pdserve.perfmodel.curve import attention_work
from pdserve.reports import Failure
from pdserve.roles import Role
from pdserve.router.events import LinkId, LoadReported
from pdserve.router.wire import worker_events
from pdserve.sampling import SamplingParams
from pdserve.worker import wire
from pdserve.worker.admission import Rules
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Command, Failed, Placed, RouterLost, RouterRef

PAGE_SIZE, NUM_PAGES, VOCAB = 4, 64, 100
OURS, THEIRS = RouterRef(1), RouterRef(2)
PEER = Peer(WorkerId("other"), Incarnation(1))
RULES = Rules(64, DigestPolicy.OFF, max_quarantined_share=1.0, lease_s=60.0, role=Role.DECODE)


def scheduler() -> Scheduler:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, eos_token_ids=frozenset())
    return Scheduler(KvCache(NUM_PAGES, PAGE_SIZE, None), limits)


def job(number: int, num_tokens: int, n: int = 1) -> Job:
    params = SamplingParams(max_tokens=8, n=n)
    tokens = tuple(range(num_tokens))
    return Job(RequestId(number.to_bytes(16)), Attempt(0), tokens, num_tokens, params, tuple(range(n)))


def step(core: WorkerCore) -> None:
    plan = core.plan(0.0)
    assert plan is not None
    core.commit(plan, FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB).run(plan), 0.0)


def test_each_router_learns_what_the_others_wait_for_on_a_prefill_worker() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, b"secret", default_rules(max_tasks=8))
    core.handle(Placed(OURS, job(1, 10), 1e9, target=PEER, target_address="host:1"), 0.0)
    core.handle(Placed(THEIRS, job(2, 30), 1e9, target=PEER, target_address="host:1"), 0.0)
    load = core.load()
    assert load.waiting_tokens == 40
    assert load.parts.others(OURS) == LoadPart(0, 0, 0, 30, attention_work(30, 0), 1, 30, attention_work(30, 0))
    assert load.parts.others(THEIRS).waiting_tokens == 10
    assert load.parts.others(RouterRef(3)).waiting_tokens == 40, "it has sent nothing"
    step(core)  # 10 of ours, 6 of theirs
    assert core.load().parts.others(THEIRS).waiting_tokens == 0
    assert core.load().parts.others(OURS).waiting_tokens == 24
    assert core.load().parts.others(OURS).waiting_work == attention_work(24, 6)


def test_each_router_learns_what_the_others_decode_or_will() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    core.handle(Placed(THEIRS, job(1, 10), 1e9, None), 0.0)
    core.handle(Placed(THEIRS, job(2, 12, n=2), 1e9, PEER), 0.0)
    assert core.load().parts.others(OURS) == LoadPart(0, 3, 34, 10, 100, 3, 10, 100)
    step(core)
    assert core.load().parts.others(OURS) == LoadPart(1, 2, 34, 0, 0, 3, 10, 100)
    assert core.load().parts.others(THEIRS) == LoadPart()


def test_what_was_taken_in_never_falls_though_its_router_is_gone() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    core.handle(Placed(THEIRS, job(1, 10), 1e9, None), 0.0)
    core.handle(RouterLost(THEIRS), 0.0)
    assert core.load().parts.others(OURS) == LoadPart(num_taken=1, taken_tokens=10, taken_work=100)


def test_a_continuation_that_is_refused_for_want_of_room_was_not_taken_in() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    for number in range(5):
        core.handle(Placed(THEIRS, job(number, 50), 1e9, PEER), 0.0)
    before = core.load().parts.others(OURS)
    (failed,) = core.handle(Placed(THEIRS, job(9, 40), 1e9, PEER, extra_tokens=9), 0.0)
    assert isinstance(failed, Failed)
    assert core.load().parts.others(OURS) == before


def test_hand_offs_without_room_say_how_many_pages_they_want() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    commands: list[Command] = []
    for number in range(6):
        commands += core.handle(Placed(OURS, job(number, 60), 1e9, PEER), 0.0)
    load = core.load()
    num_ungranted = load.num_waiting
    assert num_ungranted > 0
    assert load.pages_wanted == num_ungranted * 15


@pytest.mark.parametrize(
    "peer", [PEER, PEER._replace(incarnation=Incarnation(2))], ids=["its sender", "another process"]
)
def test_a_hand_off_that_its_sender_gives_up_waits_for_pages_no_longer(peer: Peer) -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    jobs = [job(number, 60) for number in range(6)]
    for each in jobs:
        core.handle(Placed(OURS, each, 1e9, PEER), 0.0)
    wanted, key = core.load().pages_wanted, HandoffKey(*jobs[-1].key)
    commands = core.handle(SenderSaid(peer, key, Quiesced("its prompt was cancelled")), 0.0)
    failed = [Failed(OURS, key, Failure.SENDER_GAVE_UP, "its prompt was cancelled")] if peer == PEER else []
    assert commands == failed
    assert core.load().pages_wanted == wanted - 15 * len(failed)


def test_continuations_of_a_later_attempt_that_are_cancelled_are_not_taken_off_an_earlier_one() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    placed = Placed(THEIRS, replace(job(1, 10, n=3), indices=(1,)), 1e9, PEER)
    core.handle(placed, 0.0)
    core.handle(Cancelled(placed.job.request_id, Attempt(2), (0, 2)), 0.0)
    assert core.load().parts.others(OURS) == LoadPart(0, 1, 10, 0, 0, 1)


def test_a_heartbeat_tells_each_router_of_the_others() -> None:
    core = WorkerCore(scheduler(), VOCAB, 64, bytes(16), RULES)
    core.handle(Placed(THEIRS, job(1, 10), 1e9, None), 0.0)
    refused = {Refusal.LAYOUT: 1}
    for router, others in ((OURS, LoadPart(0, 1, 10, 10, 100, 1, 10, 100)), (THEIRS, LoadPart())):
        (event,) = worker_events(LinkId(1), wire.heartbeat(core.load(), 7, refused, router))
        assert isinstance(event, LoadReported)
        assert event.load.others == others
        assert event.load.pages_free == NUM_PAGES
