"""What the router makes of the tokens that workers report: each once and in its order, whatever overtakes what."""

from dataclasses import replace

from router_driver import LAYOUT, PROMPT, Driver, placed_request

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.reports import FINISH_REASONS, Failure
from pdserve.router.requests.events import ClientGone


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
