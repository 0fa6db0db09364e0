"""Log probabilities of a prompt reach the client once, in order, and before its first token."""

from router_driver import LENGTH, Driver, placed_request

from pdserve.protocol.refusal import Refused, Status
from pdserve.protocol.reports import Stage
from pdserve.router.requests.events import LinkLost


def test_tokens_that_overtake_them_wait() -> None:
    d, prefill, decode, request = placed_request(prompt_logprobs=0)
    d.stage(decode, request, Stage.COMMITTED)
    d.tokens(decode, request, 0, 10)
    d.tokens(decode, request, 1, 11)
    assert request not in {key[0] for key in d.delivered}
    d.score(prefill, request, 1, -1.0, -2.0)
    assert d.delivered[request, 0] == [10, 11]
    d.tokens(prefill, request, 0, 10)
    d.tokens(decode, request, 2, 12, 13, end=LENGTH)
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    d.answer(request)


def test_those_of_a_lost_worker_are_computed_again_and_delivered_once() -> None:
    d = Driver()
    prefill, decode = d.pair()
    other = d.attach("p1")
    request = d.arrive(prompt_logprobs=0)
    d.score(prefill, request, 1, -1.0)
    d.stage(decode, request, Stage.COMMITTED)
    d.tokens(decode, request, 0, 99)  # what was lost with its worker is not here: it goes as well
    d.post(LinkLost(prefill, "its stream ended"))
    place = d.placed()
    assert place.spec.params.prompt_logprobs == 0
    d.score(other, request, 1, -1.5, -2.0, attempt=1)
    d.tokens(other, request, 0, 10, attempt=1)
    d.tokens(decode, request, 1, 11, 12, 13, attempt=1, end=LENGTH)
    assert d.scored[request] == [-1.0, -2.0]
    assert d.delivered[request, 0] == [10, 11, 12, 13]
    d.answer(request)


def test_an_answer_that_goes_on_elsewhere_has_no_need_of_them() -> None:
    d = Driver()
    prefill, decode = d.pair()
    d.attach("d1")
    request = d.arrive(prompt_logprobs=0)
    d.score(prefill, request, 1, -1.0, -2.0)
    d.tokens(prefill, request, 0, 10)
    d.post(LinkLost(decode, "its stream ended"))
    assert d.placed().spec.params.prompt_logprobs is None


def test_what_cannot_be_of_the_prompt_is_a_fault_of_its_worker() -> None:
    faults = {"gap": (2, (-1.0,)), "too many": (1, (-1.0, -2.0, -3.0))}
    for position, chosen in faults.values():
        d = Driver()
        prefill, _ = d.pair()
        request = d.arrive(prompt_logprobs=0)
        d.score(prefill, request, position, *chosen)
        assert d.core.placements.requests[request].placements == {}
        assert request not in d.scored


def test_a_worker_that_leaves_them_out_is_tried_no_more_often_than_others_that_fail() -> None:
    d, prefill, _, request = placed_request(prompt_logprobs=0)
    for attempt in range(4):
        d.tokens(prefill, request, 0, 10, attempt=attempt)
        d.run(0.3)
    end = d.ends[request]
    assert isinstance(end, Refused)
    assert end.status is Status.INTERNAL
    assert "tokens came, but not the log probabilities of their prompt" in end.message


def test_such_a_prompt_is_placed_as_if_nothing_of_it_were_cached() -> None:
    d = Driver()
    d.pair()
    prompt = (*range(64),)
    request = d.core.placements.requests.get(d.arrive(prompt=prompt, prompt_logprobs=0))
    assert request is not None
    assert not request.demand((0,), 0, d.now_s, 1.0).hashes
    assert request.hashes, "they are cached once they are computed"
