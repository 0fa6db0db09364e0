"""The auditor: pages that belong to nothing, and pages that something uses without holding them."""

from dataclasses import replace

import pytest
from listed_answers import Listed
from lone_core import VOCAB, LoneCore, grant, job, key_of

from pdserve.base.errors import InvariantError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.base.roles import Role
from pdserve.engine.pages import PagePool
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import PeerGone
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.reports import Failure
from pdserve.worker.admission import NUM_LOOKS, NUM_STILL_LOOKS, Draining
from pdserve.worker.load import AUDIT_EVERY_S, Auditor, Claim, leaked_pages
from pdserve.worker.messages import Cancelled, Command, DrainAsked, Failed, Ticked

P = Peer(WorkerId("p0"), Incarnation(11))


class Worker(LoneCore):
    """A worker whose steps compute a part of a prompt."""

    def __init__(self, **rules: object) -> None:
        super().__init__(max_model_len=60, step_tokens=8, **rules)  # type: ignore[arg-type]

    def looks(self, count: int) -> list[list[Command]]:
        """Return what it does at each of so many ticks."""
        return [self.core.handle(Ticked(), look / 2) for look in range(count)]


def taken(pages: Pages | None) -> Pages:
    assert pages is not None
    return pages


def test_what_is_claimed_as_it_is_had_is_not_leaked() -> None:
    pool = PagePool(8)
    shared, granted, bad = taken(pool.take(2)), taken(pool.grant(2)), taken(pool.grant(1))
    pool.share(shared[:1])
    pool.quarantine(bad)
    claims = [Claim(held=shared), Claim(held=shared[:1], granted=granted), Claim(quarantined=bad)]
    assert leaked_pages(pool, claims) == ()


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_page_without_its_owner_is_leaked(missing: int) -> None:
    pool = PagePool(8)
    shared, granted, bad = taken(pool.take(1)), taken(pool.grant(1)), taken(pool.grant(1))
    pool.share(shared)
    pool.quarantine(bad)
    claims = [Claim(held=shared), Claim(held=shared), Claim(granted=granted), Claim(quarantined=bad)]
    gone = claims.pop(missing)
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
    auditor.look([], AUDIT_EVERY_S - 0.1, idle=False)
    assert auditor.num_leaked == 0
    auditor.look([], AUDIT_EVERY_S, idle=False)
    assert auditor.num_leaked == 3
    pool.release(pages[:1])
    auditor.look([], AUDIT_EVERY_S + 0.5, idle=True)
    assert auditor.num_leaked == 2
    pool.release(pages[1:])
    auditor.look([], AUDIT_EVERY_S + 1.0, idle=True)
    assert auditor.num_leaked == 0


def test_a_page_that_leaks_from_a_real_worker_is_told_with_its_load() -> None:
    worker = Worker()
    assert worker.cache.take(2) is not None
    worker.core.handle(Ticked(), 1.0)
    assert worker.core.load().pages_leaked == 2


def test_pages_of_a_request_cancelled_in_mid_step_are_not_leaked() -> None:
    worker = Worker()
    core = worker.core
    worker.place(job(1, 20))
    plan = core.plan(0.0)
    assert plan is not None
    worker.handle(Cancelled(*key_of(1)))
    core.handle(Ticked(), 20.0)
    assert core.load().pages_held > 0
    assert core.load().pages_leaked == 0
    core.commit(plan, worker.runner.run(plan), 0.0)
    core.handle(Ticked(), 21.0)
    assert core.load().pages_free == 16
    assert core.load().pages_leaked == 0


def crowded(share: float) -> tuple[Worker, list[Command]]:
    """Return a decode worker with a lost grant of five pages of 16, and what it did about that at its next ticks."""
    worker = Worker(max_quarantined_share=share)
    worker.handle(doors.SenderAttached(P))
    for number, num_tokens in ((1, 20), (2, 52)):
        worker.place(job(number, num_tokens), source=P)
    worker.handle(doors.SenderLost(P, "reset"))
    assert worker.core.load().pages_quarantined == 5
    return worker, [command for look in worker.looks(NUM_LOOKS) for command in look]


def test_a_worker_with_too_many_quarantined_pages_drains_and_gives_back_what_waits() -> None:
    worker, commands = crowded(share=0.3)
    assert [(c.code, c.reason) for c in commands if isinstance(c, Failed)] == [
        (Failure.OVERLOADED, "5 of 16 pages are quarantined")
    ]
    assert worker.core.load().draining
    assert worker.core.load().drain_reason == "5 of 16 pages are quarantined"
    assert worker.core.drained


@pytest.mark.parametrize("source", [None, P], ids=["computed here", "handed off"])
def test_a_worker_on_which_something_waits_for_quarantined_pages_in_vain_drains(source: Peer | None) -> None:
    worker = Worker(max_quarantined_share=0.9)
    worker.handle(doors.SenderAttached(P))
    worker.place(job(1, 20), source=P)
    worker.handle(doors.SenderLost(P, "reset"))
    worker.place(job(2, 52), source=source)  # more pages than are left
    failed = [[(c.key, c.code) for c in look if isinstance(c, Failed)] for look in worker.looks(NUM_STILL_LOOKS)]
    assert failed == [[]] * (NUM_STILL_LOOKS - 1) + [[(key_of(2), Failure.OVERLOADED)]]
    assert worker.core.load().drain_reason == "5 pages that it may need are quarantined"
    assert worker.core.load().num_waiting == 0
    assert worker.core.drained


def test_a_worker_whose_pages_hand_offs_hold_gives_back_what_waits_and_goes_on() -> None:
    worker = Worker(role=Role.PREFILL)
    worker.place(job(1, 40), target=P)
    worker.hear(P, 1, grant(10))
    worker.compute()
    assert worker.core.load().pages_held == 10
    worker.place(job(2, 40))  # more pages than are left
    (failed,) = [c for look in worker.looks(NUM_STILL_LOOKS) for c in look if isinstance(c, Failed)]
    assert (failed.key, failed.reason) == (key_of(2), "hand-offs hold the pages that it needs")
    assert not worker.core.load().draining


@pytest.mark.parametrize("is_leaving", [False, True])
def test_what_waits_for_its_grammar_does_not_wait_for_pages_in_vain(is_leaving: bool) -> None:
    worker, matcher = Worker(), Listed(set(), VOCAB, is_ready=False)
    worker.place(replace(job(1, 20), new_matcher=lambda: matcher))
    if is_leaving:
        worker.handle(DrainAsked())
    assert worker.looks(NUM_STILL_LOOKS + 1) == [[]] * (NUM_STILL_LOOKS + 1)
    assert worker.core.load().draining is is_leaving
    matcher.is_ready = True
    assert worker.core.plan(0.0) is not None


def test_pages_that_are_quarantined_for_a_moment_make_no_worker_drain() -> None:
    draining = Draining(0.5)
    for _ in range(3):
        assert not any(draining.look(9, 16) for _ in range(NUM_LOOKS - 1))
        assert not draining.look(8, 16)
    assert [draining.look(9, 16) for _ in range(NUM_LOOKS)] == [False] * (NUM_LOOKS - 1) + [True]
    assert draining.is_on


def test_a_worker_with_few_quarantined_pages_goes_on_and_gets_them_back() -> None:
    worker, commands = crowded(share=0.32)
    core = worker.core
    assert commands == []
    assert not core.load().draining
    core.handle(PeerGone(P), 2.0)
    assert core.load().pages_quarantined == 0
