"""The auditor: pages that belong to nothing, and pages that something uses without holding them."""

from dataclasses import replace

import pytest
from default_rules import default_rules
from listed_answers import Listed

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.pages import PagePool, Pages
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.errors import InvariantError
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.session import Peer
from pdserve.reports import Failure
from pdserve.roles import Role
from pdserve.sampling import SamplingParams
from pdserve.worker.admission import NUM_LOOKS, NUM_STILL_LOOKS, Draining
from pdserve.worker.audit import EVERY_S, Auditor, Claim, adds_up, leaked_pages
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Command, DrainAsked, Failed, Placed, RouterRef, Ticked

P = Peer(WorkerId("p0"), Incarnation(11))
ROUTER = RouterRef(1)


def taken(pages: Pages | None) -> Pages:
    assert pages is not None
    return pages


def test_what_is_claimed_as_it_is_had_is_not_leaked() -> None:
    pool = PagePool(8)
    shared, granted, bad = taken(pool.take(2)), taken(pool.grant(2)), taken(pool.grant(1))
    pool.share(shared[:1])
    pool.quarantine(bad)
    claims = [Claim(held=shared), Claim(held=shared[:1], granted=granted), Claim(quarantined=bad)]
    assert adds_up(pool, claims)
    assert leaked_pages(pool, claims) == ()


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_page_without_its_owner_is_leaked(missing: int) -> None:
    pool = PagePool(8)
    shared, granted, bad = taken(pool.take(1)), taken(pool.grant(1)), taken(pool.grant(1))
    pool.share(shared)
    pool.quarantine(bad)
    claims = [Claim(held=shared), Claim(held=shared), Claim(granted=granted), Claim(quarantined=bad)]
    gone = claims.pop(missing)
    assert not adds_up(pool, claims)
    assert leaked_pages(pool, claims) == (*gone.held, *gone.granted, *gone.quarantined)


def test_a_page_that_is_used_by_more_than_hold_it_stops_the_worker() -> None:
    pool = PagePool(4)
    pages = taken(pool.take(1))
    with pytest.raises(InvariantError, match="page 0"):
        leaked_pages(pool, [Claim(held=pages), Claim(held=pages)])
    with pytest.raises(InvariantError, match="page 0"):
        leaked_pages(pool, [Claim(granted=pages)])


def test_the_auditor_looks_every_ten_seconds_and_at_once_when_idle() -> None:
    pool = PagePool(4)
    auditor = Auditor(pool)
    auditor.look([], 0.0, idle=False)
    pages = taken(pool.take(3))
    auditor.look([], EVERY_S - 0.1, idle=False)
    assert auditor.num_leaked == 0
    auditor.look([], EVERY_S, idle=False)
    assert auditor.num_leaked == 3
    pool.release(pages[:1])
    auditor.look([], EVERY_S + 0.5, idle=True)
    assert auditor.num_leaked == 2
    pool.release(pages[1:])
    auditor.look([], EVERY_S + 1.0, idle=True)
    assert auditor.num_leaked == 0


def scheduler(num_pages: int = 16) -> Scheduler:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=60, eos_token_ids=frozenset())
    return Scheduler(KvCache(num_pages, 4, None), limits)


def job(number: int, num_tokens: int = 20) -> Job:
    params = SamplingParams(max_tokens=4, seed=number)
    return Job(RequestId(number.to_bytes(16)), Attempt(0), (7,) * num_tokens, num_tokens, params, (0,))


def test_a_page_that_leaks_from_a_real_worker_is_told_with_its_load() -> None:
    pages = scheduler()
    core = WorkerCore(pages, 997, 64, b"secret", default_rules(max_tasks=8))
    assert pages.cache.take(2) is not None
    core.handle(Ticked(), 1.0)
    assert core.load().pages_leaked == 2


def test_pages_of_a_request_cancelled_in_mid_step_are_not_leaked() -> None:
    pages = scheduler()
    core, runner = WorkerCore(pages, 997, 64, b"secret", default_rules(max_tasks=8)), FakeRunner(16, 4, 997)
    core.handle(Placed(ROUTER, job(1), 1e9, None), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.handle(Cancelled(job(1).request_id, Attempt(0)), 0.0)
    core.handle(Ticked(), 20.0)
    assert core.load().pages_held > 0
    assert core.load().pages_leaked == 0
    core.commit(plan, runner.run(plan), 0.0)
    core.handle(Ticked(), 21.0)
    assert core.load().pages_free == 16
    assert core.load().pages_leaked == 0


def crowded(share: float) -> tuple[WorkerCore, list[Command]]:
    """Return a decode worker with a lost grant of five pages of 16, and what it did about that at its next ticks."""
    core = WorkerCore(scheduler(), 997, 64, b"secret", default_rules(max_quarantined_share=share))
    core.handle(doors.SenderAttached(P), 0.0)
    for number, num_tokens in ((1, 20), (2, 52)):
        core.handle(Placed(ROUTER, job(number, num_tokens), 1e9, P), 0.0)
    core.handle(doors.SenderLost(P, "reset"), 0.0)
    assert core.load().pages_quarantined == 5
    return core, [command for look in range(NUM_LOOKS) for command in core.handle(Ticked(), look / 2)]


def test_a_worker_with_too_many_quarantined_pages_drains_and_gives_back_what_waits() -> None:
    core, commands = crowded(share=0.3)
    assert [(c.code, c.reason) for c in commands if isinstance(c, Failed)] == [
        (Failure.OVERLOADED, "5 of 16 pages are quarantined")
    ]
    assert core.load().draining
    assert core.load().drain_reason == "5 of 16 pages are quarantined"
    assert core.drained


@pytest.mark.parametrize("source", [None, P], ids=["computed here", "handed off"])
def test_a_worker_on_which_something_waits_for_quarantined_pages_in_vain_drains(source: Peer | None) -> None:
    core = WorkerCore(scheduler(), 997, 64, b"secret", default_rules(max_quarantined_share=0.9))
    core.handle(doors.SenderAttached(P), 0.0)
    core.handle(Placed(ROUTER, job(1, 20), 1e9, P), 0.0)
    core.handle(doors.SenderLost(P, "reset"), 0.0)
    core.handle(Placed(ROUTER, job(2, 52), 1e9, source), 0.0)  # more pages than are left
    looks = [core.handle(Ticked(), look / 2) for look in range(NUM_STILL_LOOKS)]
    failed = [[(c.key.request_id, c.code) for c in commands if isinstance(c, Failed)] for commands in looks]
    assert failed == [[]] * (NUM_STILL_LOOKS - 1) + [[(job(2, 52).request_id, Failure.OVERLOADED)]]
    assert core.load().drain_reason == "5 pages that it may need are quarantined"
    assert core.load().num_waiting == 0
    assert core.drained


def test_a_worker_whose_pages_hand_offs_hold_gives_back_what_waits_and_goes_on() -> None:
    core = WorkerCore(scheduler(), 997, 64, b"secret", default_rules(role=Role.PREFILL))
    core.handle(Placed(ROUTER, job(1, 40), 1e9, target=P, target_address="p"), 0.0)
    while (plan := core.plan(0.0)) is not None:
        core.commit(plan, FakeRunner().run(plan), 0.0)
    core.handle(Placed(ROUTER, job(2, 40), 1e9), 0.0)  # more pages than are left
    looks = [core.handle(Ticked(), look / 2) for look in range(NUM_STILL_LOOKS)]
    (failed,) = [command for commands in looks for command in commands if isinstance(command, Failed)]
    assert (failed.key.request_id, failed.reason) == (job(2, 40).request_id, "hand-offs hold the pages that it needs")
    assert not core.load().draining


@pytest.mark.parametrize("is_leaving", [False, True])
def test_what_waits_for_its_grammar_does_not_wait_for_pages_in_vain(is_leaving: bool) -> None:
    core, matcher = WorkerCore(scheduler(), 997, 64, b"secret", default_rules()), Listed(set(), 997, is_ready=False)
    core.handle(Placed(ROUTER, replace(job(1), new_matcher=lambda: matcher), 1e9), 0.0)
    if is_leaving:
        core.handle(DrainAsked(), 0.0)
    assert [core.handle(Ticked(), look / 2) for look in range(NUM_STILL_LOOKS + 1)] == [[]] * (NUM_STILL_LOOKS + 1)
    assert core.load().draining is is_leaving
    matcher.is_ready = True
    assert core.plan(0.0) is not None


def test_pages_that_are_quarantined_for_a_moment_make_no_worker_drain() -> None:
    draining = Draining(0.5)
    for _ in range(3):
        assert not any(draining.look(9, 16) for _ in range(NUM_LOOKS - 1))
        assert not draining.look(8, 16)
    assert [draining.look(9, 16) for _ in range(NUM_LOOKS)] == [False] * (NUM_LOOKS - 1) + [True]
    assert draining.is_on


def test_a_worker_with_few_quarantined_pages_goes_on_and_gets_them_back() -> None:
    core, commands = crowded(share=0.32)
    assert commands == []
    assert not core.load().draining
    core.handle(PeerGone(P), 2.0)
    assert core.load().pages_quarantined == 0
