"""While no pair of workers can serve, requests wait for one; who was there at several deaths is not tried again."""

import pytest
from router_driver import LENGTH, Driver, placed_request

from pdserve.base.errors import PeerFault
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.protocol.refusal import Cause, Status
from pdserve.router.config import Limits
from pdserve.router.requests.commands import DropLink, Finished, SendProcessGone
from pdserve.router.requests.events import DrainAsked, LinkId, LinkLost, ProcessEnded, RequestId

PATIENT = Limits(worker_silence_s=1e6)


def lose(d: Driver, link: LinkId) -> None:
    d.post(LinkLost(link, "its stream ended"))


def replace_decode(d: Driver, link: LinkId, incarnation: int) -> LinkId:
    """Let a decode worker die and its successor attach."""
    lose(d, link)
    return d.attach("d0", incarnation=incarnation)


def finish(d: Driver, prefill: LinkId, decode: LinkId, request: RequestId, attempt: int = 0) -> None:
    d.tokens(prefill, request, 0, 10, attempt=attempt)
    d.tokens(decode, request, 1, 11, 12, 13, attempt=attempt, end=LENGTH)
    assert isinstance(d.ends[request], Finished)
    d.core.check_idle()


# ---- waiting for a pair


def test_a_request_that_finds_no_worker_is_served_as_soon_as_there_is_a_pair() -> None:
    d = Driver()
    prefill = d.attach("p0")
    request = d.arrive()
    assert (d.core.num_held, d.last) == (1, [])
    decode = d.attach("d0")
    assert d.placed().spec.request_id == request
    finish(d, prefill, decode, request)


def test_a_request_whose_last_worker_is_lost_goes_on_with_the_next_one() -> None:
    d = Driver(PATIENT)
    prefill, decode = d.pair()
    request = d.arrive()
    d.tokens(prefill, request, 0, 10)
    lose(d, decode)
    assert request not in d.ends
    d.wait(29.0)
    decode = d.attach("d0", incarnation=2)
    assert (d.placed().spec.attempt, list(d.placed().spec.token_ids)) == (1, [5, 6, 7, 10])
    d.tokens(prefill, request, 1, 11, attempt=1)
    d.tokens(decode, request, 2, 12, 13, attempt=1, end=LENGTH)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    d.answer(request)


def test_a_pair_renews_the_grace() -> None:
    d = Driver()
    prefill, decode = d.pair()
    lose(d, decode)
    d.now_s += 31.0
    assert d.refusal(d.arrive()).status is Status.UNAVAILABLE
    again = d.attach("d0", incarnation=2)
    lose(d, again)
    request = d.arrive()
    last = d.attach("d0", incarnation=3)
    finish(d, prefill, last, request)


def test_a_sign_of_life_is_waited_for_but_by_each_request_no_longer_than_the_grace() -> None:
    d = Driver(PATIENT)
    _, decode = d.pair()
    lose(d, decode)
    d.now_s += 10.0
    early = d.arrive()
    d.now_s += 15.0
    d.attach("d0", incarnation=2, ready=False)
    d.now_s += 10.0
    late = d.arrive()
    d.wait(5.0)
    assert (early in d.ends, late in d.ends) == (True, False)
    d.wait(15.0)
    assert d.refusal(late).status is Status.UNAVAILABLE
    assert d.refusal(late).message == "no decode worker is ready (d0: it is loading)"
    assert d.refusal(d.arrive()).status is Status.UNAVAILABLE, "it has told nothing for as long"
    d.core.check_idle()


def test_a_deadline_ends_the_wait_for_a_pair() -> None:
    d = Driver()
    prefill, decode = d.pair()
    running, short = d.arrive(deadline_in_s=5.0), d.arrive(deadline_in_s=4.0)
    lose(d, decode)
    held = d.arrive(deadline_in_s=3.0)
    for seconds, request in ((3.0, held), (1.0, short), (1.0, running)):
        d.wait(seconds)
        assert d.refusal(request).status is Status.DEADLINE_EXCEEDED
    del prefill
    d.core.check_idle()


def test_no_more_requests_wait_for_a_pair_than_may_be_held() -> None:
    d = Driver(Limits(max_num_held=2))
    requests = [d.arrive() for _ in range(3)]
    assert [request in d.ends for request in requests] == [False, False, True]
    assert d.refusal(requests[2]).status is Status.RESOURCE_EXHAUSTED


def test_a_pool_that_drains_wholly_is_waited_for_too() -> None:
    d = Driver()
    _, decode = d.pair()
    d.post(DrainAsked(decode))
    request = d.arrive()
    assert request not in d.ends
    d.attach("d1")
    assert d.placed().spec.request_id == request


# ---- deaths


@pytest.mark.parametrize("incarnation", [2, 3])
def test_a_request_present_at_two_deaths_is_not_tried_a_third_time(incarnation: int) -> None:
    d, _, decode, request = placed_request()
    decode = replace_decode(d, decode, 2)
    assert d.placed().spec.attempt == 1
    replace_decode(d, decode, 3)
    assert d.placements() == [], "it waits for a word of what ended them"
    d.post(ProcessEnded(Peer(WorkerId("d0"), Incarnation(incarnation))))
    d.wait(5.0)
    refusal = d.refusal(request)
    assert refusal.status is Status.INTERNAL
    assert "not tried again" in refusal.message
    d.core.check_idle()


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_deaths_from_outside_are_no_evidence(is_lost_first: bool) -> None:
    d, prefill, decode, request = placed_request()
    for incarnation in range(1, 6):
        if is_lost_first:
            lose(d, decode)
        d.post(ProcessEnded(Peer(WorkerId("d0"), Incarnation(incarnation)), from_outside=True))
        decode = d.attach("d0", incarnation=incarnation + 1)
        assert d.placed().spec.attempt == incarnation
    finish(d, prefill, decode, request, attempt=5)


def test_a_late_word_from_the_launcher_clears_a_suspect() -> None:
    d = Driver()
    _, decode = d.pair()
    d.arrive()
    decode = replace_decode(d, decode, 2)
    replace_decode(d, decode, 3)
    assert d.placements() == []
    d.now_s += 1.0
    d.post(ProcessEnded(Peer(WorkerId("d0"), Incarnation(2)), from_outside=True))
    assert d.placed().spec.attempt == 2


def test_a_worker_that_attaches_again_was_not_ended_by_anybody() -> None:
    d = Driver()
    _, decode = d.pair()
    d.arrive()
    for attempt in range(1, 4):
        lose(d, decode)
        decode = d.attach("d0")
        assert d.placed().spec.attempt == attempt


def test_a_request_that_gains_tokens_between_deaths_is_not_suspected() -> None:
    d, prefill, decode, request = placed_request(max_tokens=9)
    for attempt in range(6):
        d.tokens(prefill, request, attempt, 10 + attempt, attempt=attempt)
        decode = replace_decode(d, decode, attempt + 2)
        assert d.placed().spec.attempt == attempt + 1
    assert request not in d.ends


# ---- who follows whom


def test_the_next_process_of_a_name_proves_the_end_of_the_one_before() -> None:
    d = Driver()
    prefill, decode = d.pair()
    lose(d, decode)
    successor = d.attach("d0", incarnation=2)
    told = [command for command in d.last if isinstance(command, SendProcessGone)]
    assert SendProcessGone(prefill, Peer(WorkerId("d0"), Incarnation(1))) in told
    assert {gone.process for gone in told} == {("d0", 1)}
    d.post(ProcessEnded(Peer(WorkerId("p9"), Incarnation(1))))
    lose(d, successor)
    d.attach("d0", incarnation=2)
    assert SendProcessGone(prefill, Peer(WorkerId("d0"), Incarnation(2))) not in d.last, "it is the same process"


def told_gone(d: Driver) -> set[tuple[str, int]]:
    return {gone.process for gone in d.last if isinstance(gone, SendProcessGone)}


def dropped(d: Driver) -> list[tuple[LinkId, PeerFault | None]]:
    return [(drop.link, drop.refusal) for drop in d.last if isinstance(drop, DropLink)]


def test_a_process_known_to_have_ended_is_sent_away() -> None:
    d = Driver()
    _, decode = d.pair()
    lose(d, decode)
    d.attach("d0", incarnation=2)
    ghost = d.attach("d0", incarnation=1)
    assert dropped(d) == [(ghost, PeerFault.INCARNATION)]
    d.arrive()
    place = d.placed()
    assert place.decode is not None
    assert place.decode.incarnation == 2


def test_a_router_that_has_just_started_takes_no_earlier_process_for_a_laters_successor() -> None:
    d = Driver()
    d.attach("p0")
    d.attach("d0", incarnation=2)
    zombie = d.attach("d0", incarnation=1)
    assert dropped(d) == [(zombie, PeerFault.INCARNATION)]
    assert told_gone(d) == set()
    d.arrive()
    place = d.placed()
    assert place.decode is not None
    assert place.decode.incarnation == 2


def test_an_earlier_process_is_refused_while_its_successor_is_not_attached_too() -> None:
    d = Driver()
    d.attach("p0")
    lose(d, d.attach("d0", incarnation=2))
    zombie = d.attach("d0", incarnation=1)
    assert dropped(d) == [(zombie, PeerFault.INCARNATION)]


@pytest.mark.parametrize("age_s", [0.0, 1.0])
def test_a_process_that_is_attached_when_its_successor_comes_has_not_ended(age_s: float) -> None:
    d = Driver()
    _, zombie = d.pair()
    successor = d.attach("d0", incarnation=2, age_s=age_s)
    assert dropped(d) == [(zombie, PeerFault.INCARNATION)]
    assert told_gone(d) == set()
    lose(d, successor)
    d.attach("d0", incarnation=3)
    assert told_gone(d) == {("d0", 2)}
    d.post(ProcessEnded(Peer(WorkerId("d0"), Incarnation(1))))
    assert told_gone(d) == {("d0", 1)}


@pytest.mark.parametrize(("age_s", "proves"), [(2.5, True), (3.5, False)])
def test_it_is_the_last_word_of_a_lost_process_that_counts(age_s: float, *, proves: bool) -> None:
    d = Driver()
    _, decode = d.pair()
    d.now_s += 3.0
    lose(d, decode)
    d.attach("d0", incarnation=2, age_s=age_s)
    assert told_gone(d) == ({("d0", 1)} if proves else set())


def test_after_a_process_known_to_have_ended_one_whose_clock_is_behind_may_attach() -> None:
    d = Driver()
    d.attach("p0")
    d.attach("d0", incarnation=7)
    d.post(ProcessEnded(Peer(WorkerId("d0"), Incarnation(7))))
    d.attach("d0", incarnation=5)
    assert dropped(d) == []
    d.arrive()
    assert d.placed().decode is not None


def test_a_request_that_waits_in_vain_is_counted_by_what_it_waited_for() -> None:
    d = Driver(Limits(pool_grace_s=60.0, max_num_held=1))
    low, late = d.arrive(), d.arrive(priority=1, deadline_in_s=1.0)
    d.wait(1.0)
    assert [d.refusal(each).cause for each in (low, late)] == [Cause.TURN, Cause.DEADLINE]
    assert all("no prefill worker is ready" in d.refusal(each).message for each in (low, late))
    assert d.core.placements.refused_because == {Cause.NO_PREFILL: 2}
