"""What the router makes of the tokens that workers report: each once and in its order, whatever overtakes what."""

from dataclasses import replace

import pytest
from router_driver import LAYOUT, PROMPT, STOP, Driver, placed_request

from pdserve.capacity.wires import Delta
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.drafts import Acceptance
from pdserve.protocol.link import SOURCES
from pdserve.protocol.reports import FINISH_REASONS, Failure
from pdserve.router.live import Live
from pdserve.router.requests.events import ClientGone, StepReported
from pdserve.router.wire import ledger_message


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


def test_sources_of_guesses_are_those_of_the_proto() -> None:
    names = {number: name for name, number in link.DraftSource.items() if number}
    assert names == {number: f"DRAFT_SOURCE_{source.name}" for number, source in SOURCES.items()}


def of_guesses(source: int, num_draft_tokens: int, num_accepted_tokens: int) -> link.VerifiedDraft:
    return link.VerifiedDraft(
        source=source,  # type: ignore[arg-type]
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
    )


def test_the_ledger_has_the_guesses_of_tokens_that_are_news_by_source_and_place() -> None:
    d, prefill, decode, request = placed_request(max_tokens=9)
    d.tokens(prefill, request, 0, 10)
    several = of_guesses(1, 4, 2), of_guesses(2, 3, 0), of_guesses(1, 5, 1)
    told = Delta(request, 0, 0, 1, (11, 12, 13, 14, 15, 16), drafts=several)
    last = Delta(request, 0, 0, 7, (17,), STOP, drafts=(of_guesses(4, 1, 0),))
    for delta in (told, told, last):  # the second time all of its tokens are known
        d.post(StepReported(decode, [delta]))
    counted = {"ngram": Acceptance(2, 9, [2, 1]), "suffix": Acceptance(1, 3, []), "eagle3": Acceptance(1, 1, [])}
    ledger = d.answer(request).ledger
    assert ledger.drafts == counted
    shown = ledger_message(ledger).drafts
    assert {source: (each.num_drafts, list(each.num_accepted_tokens_per_pos)) for source, each in shown.items()} == {
        "ngram": (2, [2, 1]),
        "suffix": (1, []),
        "eagle3": (1, []),
    }
    assert Live(d.core, admin.ClusterStatus, 0.0).state(d.now_s, 0.0)["drafts"]["ngram"]["num_draft_tokens"] == 9


@pytest.mark.parametrize("told", [(0, 3, 1), (6, 3, 1), (1, 3, 4), (1, 16, 0), (1, 0, 0)])
def test_guesses_that_cannot_be_end_the_attempt(told: tuple[int, int, int]) -> None:
    d, prefill, decode, request = placed_request()
    d.tokens(prefill, request, 0, 10)
    d.post(StepReported(decode, [Delta(request, 0, 0, 1, (11,), drafts=(of_guesses(1, 4, 1), of_guesses(*told)))]))
    assert d.core.placements.requests[request].ledger.drafts == {}
    assert {cancel.link for cancel in d.cancels()} == {prefill, decode}
    assert d.delivered[request, 0] == [10]


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
