"""What the router makes of the tokens that workers report: each once and in its order, whatever overtakes what."""

from dataclasses import replace
from itertools import permutations

from router_driver import LAYOUT, LENGTH, PROMPT, Driver, placed_request

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.reports import FINISH_REASONS, Failure, Stage
from pdserve.router.events import ClientGone, StopStringFound


def test_tokens_are_taken_once_and_in_order() -> None:
    d, prefill, decode, request = placed_request()
    d.tokens(prefill, request, 0, 10)
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, 12)
    d.tokens(decode, request, 1, 11, 12)
    d.tokens(decode, request, 2, 12, 13, end=LENGTH)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    assert d.answer(request).usage.completion_tokens == 4


def test_an_answer_is_complete_and_in_order_whichever_worker_reports_first() -> None:
    for order in permutations(["prefill", "decode", "decode", "decode"]):
        d = Driver()
        prefill, decode = d.pair()
        request = d.arrive()
        d.stage(decode, request, Stage.COMMITTED)
        reports = iter([(0, (10,), 0), (1, (11, 12), 0), (3, (13,), LENGTH)])
        for who in order:
            if who == "prefill":
                d.tokens(prefill, request, 0, 10)
            else:
                position, tokens, end = next(reports)
                d.tokens(decode, request, position, *tokens, end=end)
        assert d.delivered[request, 0] == [10, 11, 12, 13]
        assert d.answer(request).ledger.decode_worker == "d0"


def test_a_first_token_from_the_decode_worker_ends_the_wait_for_it() -> None:
    d, prefill, decode, request = placed_request()
    d.wait(0.5)
    d.stage(decode, request, Stage.COMMITTED)
    d.tokens(decode, request, 0, 10)
    d.core.workers.known(prefill).check_idle()
    d.wait(0.5)
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, 12, 13, end=LENGTH)
    assert d.answer(request).ledger.ttft_ms == 500.0


def test_an_unknown_finish_reason_ends_the_attempt_but_not_the_request() -> None:
    d, prefill, _, request = placed_request()
    d.tokens(prefill, request, 0, 10, end=3)
    assert (request, 0) not in d.delivered
    assert request not in d.ends
    d.post(ClientGone(request))
    d.core.check_idle()


def test_finish_reasons_are_those_of_the_proto() -> None:
    names = {number: name for name, number in inference.FinishReason.items() if number}
    assert names == {number: f"FINISH_REASON_{name.upper()}" for number, name in FINISH_REASONS.items()}


def test_a_gap_ends_the_attempt_but_not_the_request() -> None:
    d, prefill, decode, request = placed_request()
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 2, 12)
    assert {cancel.link for cancel in d.cancels()} == {prefill, decode}
    d.wait(0.05)
    place = d.placed()
    assert (place.spec.attempt, tuple(place.spec.token_ids)) == (1, (*PROMPT, 10))


def test_more_tokens_than_asked_for_are_not_delivered() -> None:
    d, prefill, decode, request = placed_request()
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 1, 11, 12, 13, 14)
    assert d.delivered[request, 0] == [10]
    assert d.core.num_active == 1


def test_tokens_of_an_attempt_that_is_over_are_ignored() -> None:
    d, prefill, decode, request = placed_request()
    d.fail(decode, request, Failure.TRANSFER_FAILED)
    d.wait(0.05)
    d.tokens(prefill, request, 0, 10)
    assert d.delivered == {}
    d.tokens(prefill, request, 0, 10, attempt=1)
    assert d.delivered[request, 0] == [10]


def test_tokens_of_another_worker_are_ignored() -> None:
    d = Driver()
    d.pair()
    stranger = d.attach("d9", layout=replace(LAYOUT, page_size=32))
    request = d.arrive()
    d.tokens(stranger, request, 0, 10)
    assert d.delivered == {}


def test_a_stop_string_ends_one_continuation_and_the_others_go_on() -> None:
    d, prefill, decode, request = placed_request(n=2, max_tokens=2)
    d.tokens(prefill, request, 0, 10, index=0)
    d.tokens(prefill, request, 0, 20, index=1)
    d.post(StopStringFound(request, 0))
    assert {(c.link, c.indices) for c in d.cancels()} == {(prefill, (0,)), (decode, (0,))}
    d.tokens(decode, request, 1, 11, index=0)
    d.tokens(decode, request, 1, 21, index=1)
    assert d.delivered == {(request, 0): [10], (request, 1): [20, 21]}
    d.answer(request)
