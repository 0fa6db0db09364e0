"""What the router does when workers are lost, attempts fail and processes follow one another."""

from dataclasses import replace

import pytest
from router_driver import LENGTH, STOP, Driver, placed_request

from pdserve.base.errors import PeerFault
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.protocol.refusal import Cause, Refused, Status
from pdserve.protocol.reports import Failure, LoadPart, ReportedLoad, Stage
from pdserve.protocol.sampling import StructuredOutput
from pdserve.router.config import Limits
from pdserve.router.requests.commands import DropLink, SendProcessGone
from pdserve.router.requests.events import LinkLost, LoadReported, ProcessEnded


def test_a_hand_off_that_its_sender_ends_is_no_failure_while_the_sender_is_there() -> None:
    d, prefill, decode, request = placed_request()
    d.fail(decode, request, Failure.SENDER_GAVE_UP)  # overtakes the first token, which is the last one
    assert not d.placements()
    d.run(1.0)
    d.tokens(prefill, request, 0, 10, end=STOP)
    assert d.answer(request).ledger.attempts == 1


def test_a_hand_off_whose_sender_gave_it_up_and_is_lost_is_placed_again() -> None:
    d, prefill, decode, request = placed_request()
    d.attach("p1")
    d.fail(decode, request, Failure.SENDER_GAVE_UP)
    d.post(LinkLost(prefill, "its stream ended"))
    assert d.placed().spec.attempt == 1
    assert request not in d.ends


def test_continuations_with_tokens_are_placed_again_one_by_one() -> None:
    d, prefill, first, request = placed_request(n=3, max_tokens=3)
    for index in range(3):
        d.tokens(prefill, request, 0, index, index=index)
    d.tokens(first, request, 1, 11, index=1)
    d.tokens(first, request, 1, 12, end=STOP, index=2)
    d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    again = {(p.spec.attempt, p.spec.indices, tuple(p.spec.token_ids[3:])) for p in d.placements()}
    assert again == {(1, (0,), (0,)), (2, (1,), (1, 11))}


def test_decode_goes_on_without_its_prefill_worker() -> None:
    d, prefill, decode, request = placed_request()
    d.tokens(prefill, request, 0, 10)
    d.stage(decode, request, Stage.COMMITTED)
    d.post(LinkLost(prefill, "its stream ended"))
    assert d.placements() == []
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    d.answer(request)


@pytest.mark.parametrize("loss", ["lost", "failed"])
def test_decode_goes_on_without_a_first_token_of_its_prefill_worker(loss: str) -> None:
    d, prefill, decode, request = placed_request()
    d.stage(decode, request, Stage.COMMITTED)
    if loss == "lost":
        d.post(LinkLost(prefill, "its stream ended"))
    else:
        d.fail(prefill, request, Failure.PEER_LOST)
    assert (d.cancels(), d.placements()) == ([], [])
    d.tokens(decode, request, 0, 10, 11, 12, 13, end=LENGTH)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    assert d.answer(request).ledger.attempts == 1


def test_a_continuation_whose_only_token_was_lost_with_the_prompts_worker_is_placed_again() -> None:
    d = Driver()
    prefill, decode = d.pair()
    d.attach("p1")
    request = d.arrive(n=2)
    d.stage(decode, request, Stage.COMMITTED)
    d.tokens(decode, request, 0, 10)  # of the other one nobody but the lost worker knew that it had ended
    d.post(LinkLost(prefill, "its stream ended"))
    assert [(c.link, c.indices) for c in d.cancels()] == [(decode, (1,))]
    again = d.placed()
    assert (again.spec.indices, again.spec.attempt, len(again.spec.token_ids)) == ((1,), 1, 3)
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    d.tokens(again.prefill.link, request, 0, 20, attempt=1, index=1, end=STOP)
    assert d.delivered[request, 1] == [20]
    d.answer(request)


def test_of_several_continuations_of_which_none_has_come_all_are_placed_again() -> None:
    d = Driver()
    prefill, decode = d.pair()
    d.attach("p1")
    request = d.arrive(n=2)
    d.stage(decode, request, Stage.COMMITTED)
    d.post(LinkLost(prefill, "its stream ended"))
    assert d.placed().spec.indices == (0, 1)


@pytest.mark.parametrize(
    ("failure", "cause", "most"), [(Failure.OVERLOADED, Cause.LOST_WORKERS, 8), (Failure.INTERNAL, Cause.FAILED, 3)]
)
def test_attempts_are_bounded(failure: Failure, cause: Cause, most: int) -> None:
    d = Driver(Limits(worker_silence_s=1e6))
    prefill, _ = d.pair()
    request = d.arrive()
    for attempt in range(most):
        assert request not in d.ends
        d.fail(prefill, request, failure, attempt)
        d.wait(1.0)
    assert d.refusal(request) == Refused(cause, f"p0: {failure.name}: no luck; placed {most} times")
    d.core.check_idle()


def test_a_failed_attempt_is_placed_elsewhere_where_there_is_an_elsewhere() -> None:
    d = Driver()
    for name in ("p0", "p1", "d0", "d1"):
        d.attach(name)
    request = d.arrive()
    first = d.placed()
    assert first.decode is not None
    d.fail(first.prefill.link, request, Failure.PEER_LOST)
    d.wait(0.05)
    second = d.placed()
    assert second.decode is not None
    assert second.decode.link != first.decode.link, "the peer is to blame"


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Failure.PEER_LOST, Status.UNAVAILABLE),
        (Failure.TRANSFER_FAILED, Status.UNAVAILABLE),
        (Failure.OVERLOADED, Status.UNAVAILABLE),
        (Failure.DIGEST_MISMATCH, Status.INTERNAL),
        (Failure.INTERNAL, Status.INTERNAL),
    ],
)
def test_the_last_failure_decides_the_status(failure: Failure, status: Status) -> None:
    d = Driver(Limits(max_attempts=1, max_interruptions=1))
    prefill, decode = d.pair()
    request = d.arrive()
    d.fail(prefill, request, failure)
    assert d.refusal(request).status is status
    assert {c.link for c in d.cancels()} == {prefill, decode}


def test_what_no_worker_can_serve_is_not_tried_again() -> None:
    d, prefill, _, request = placed_request()
    d.fail(prefill, request, Failure.INVALID)
    assert d.refusal(request) == Refused(Cause.FAILED, "p0: INVALID: no luck")


def test_an_answer_that_its_grammar_leads_nowhere_is_its_client_s_fault() -> None:
    d = Driver()
    prefill, _ = d.pair()
    request = d.arrive(structured_output=StructuredOutput("regex", ("a{1000000}",)))
    d.fail(prefill, request, Failure.INVALID)
    assert d.refusal(request) == Refused(Cause.INVALID, "structured_output.regex: no luck")


def test_the_last_worker_of_a_pool_takes_its_requests_with_it() -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, decode = d.pair()
    request = d.arrive(n=3)
    for index in range(3):
        d.tokens(prefill, request, 0, 10, index=index)
    d.post(LinkLost(decode, "its stream ended"))
    refusal = d.refusal(request)
    assert refusal.status is Status.UNAVAILABLE
    assert refusal.message == "d0 was lost (its stream ended), and no decode worker is ready"
    d.core.check_idle()


def test_the_last_worker_of_a_pool_may_hold_several_placements_of_a_request() -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, first = d.pair()
    request = d.arrive(n=3)
    for index in range(3):
        d.tokens(prefill, request, 0, 10, index=index)
    second = d.attach("d1")
    d.post(LinkLost(first, "its stream ended"))
    assert len(d.placements()) == 3
    d.tokens(prefill, request, 1, 11, attempt=d.placements()[0].spec.attempt)  # so nothing is suspected of both losses
    d.post(LinkLost(second, "its stream ended"))
    assert d.refusal(request).status is Status.UNAVAILABLE
    d.core.check_idle()


def test_a_silent_worker_is_dropped_and_a_loading_one_is_not() -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, decode = d.pair()
    loading = d.attach("d1", ready=False)
    request = d.arrive()
    d.wait(3.0)
    d.post(LoadReported(prefill, ReportedLoad(100)))
    assert d.core.next_wakeup_s() == 103.75
    d.wait(0.75)
    assert not [c for c in d.last if isinstance(c, DropLink)]
    assert d.core.next_wakeup_s() == 104.0
    d.wait(0.25)
    assert [c.link for c in d.last if isinstance(c, DropLink)] == [decode]
    assert d.refusal(request).status is Status.UNAVAILABLE
    assert d.core.workers.get(loading) is not None


@pytest.mark.parametrize("stood_still_s", [4.0, 4.1, 9.0])
def test_workers_are_not_lost_because_the_router_stood_still_itself(stood_still_s: float) -> None:
    d = Driver(Limits(pool_grace_s=0))
    prefill, decode = d.pair()
    request = d.arrive()
    d.wait(stood_still_s)  # what was sent meanwhile is read after that
    assert not [c for c in d.last if isinstance(c, DropLink)]
    d.post(LoadReported(prefill, ReportedLoad(100)))
    assert d.core.next_wakeup_s() == 100 + stood_still_s + 0.25
    d.wait(0.25)
    assert [c.link for c in d.last if isinstance(c, DropLink)] == [decode], "it has sent nothing"
    assert d.refusal(request).status is Status.UNAVAILABLE


def test_a_router_that_is_always_late_drops_silent_workers_all_the_same() -> None:
    d = Driver(Limits(pool_grace_s=0))
    d.pair()
    for _ in range(2):
        d.wait(9.0)
    assert len([c for c in d.last if isinstance(c, DropLink)]) == 2


def test_a_process_that_attaches_again_replaces_its_former_stream_and_is_not_sent_away() -> None:
    d = Driver()
    _, old = d.pair()
    d.attach("d0")
    assert DropLink(old, "its name attached again") in d.last


def test_a_worker_may_not_become_another() -> None:
    d = Driver()
    prefill, _ = d.pair()
    told = d.core.workers.known(prefill).registration
    d.post(replace(told, incarnation=Incarnation(7)))
    assert [c.link for c in d.last if isinstance(c, DropLink)] == [prefill]


def test_the_end_of_a_process_is_told_to_workers_now_and_later() -> None:
    d = Driver()
    prefill, decode = d.pair()
    d.post(ProcessEnded(Peer(WorkerId("d0"), Incarnation(1))))
    drops = [(c.link, c.refusal) for c in d.last if isinstance(c, DropLink)]
    assert drops == [(decode, PeerFault.INCARNATION)], "where it lives, it has to end"
    assert SendProcessGone(prefill, Peer(WorkerId("d0"), Incarnation(1))) in d.last
    late = d.attach("p1")
    assert SendProcessGone(late, Peer(WorkerId("d0"), Incarnation(1))) in d.last


def test_nothing_is_placed_on_a_worker_whose_last_steps_failed_while_another_serves() -> None:
    d = Driver()
    sound, failing = d.attach("p0"), d.attach("p1")
    d.attach("d0")
    d.post(LoadReported(failing, ReportedLoad(100, failed_steps=2)))
    d.post(LoadReported(sound, ReportedLoad(100, others=LoadPart(waiting_tokens=900))))
    for _ in range(3):
        d.arrive()
        assert d.placed().prefill.link == sound
    d.post(LinkLost(sound, "its stream ended"))
    d.arrive()
    assert d.placed().prefill.link == failing


def test_a_worker_that_computes_again_is_given_requests_again() -> None:
    d = Driver()
    sound, failing = d.attach("p0"), d.attach("p1")
    d.attach("d0")
    d.post(LoadReported(failing, ReportedLoad(100, failed_steps=2)))
    d.post(LoadReported(sound, ReportedLoad(100, others=LoadPart(waiting_tokens=900))))
    d.post(LoadReported(failing, ReportedLoad(100, failed_steps=0)))
    d.arrive()
    assert d.placed().prefill.link == failing
