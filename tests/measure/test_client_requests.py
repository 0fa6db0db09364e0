"""What a measurement sends."""

from google.protobuf.json_format import ParseDict

from pdserve.measure.client import Sampling, requests_of, take_ledger
from pdserve.measure.outcomes import ANY, Outcome
from pdserve.measure.workload import fixed_lengths
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.drafts import Acceptance
from pdserve.router.frontend.openai.dialect import ledger_of
from pdserve.router.requests.timeline import Ledger
from pdserve.router.wire import ledger_message


def test_guesses_in_a_ledger_reach_the_client_over_both_protocols() -> None:
    drafts = {"ngram": Acceptance(3, 12, [2, 1]), "suffix": Acceptance(1, 2, [])}
    ledger = Ledger(drafts=drafts)
    over_http = ParseDict(ledger_of("", ledger), inference.Ledger(), ignore_unknown_fields=True)
    for told in (ledger_message(ledger), over_http):
        outcome = Outcome(0.0, 1, 1)
        take_ledger(outcome, told)
        assert outcome.drafts == drafts


def test_requests_are_greedy_unless_they_are_to_be_drawn() -> None:
    arrivals = fixed_lengths("", 2, 3, 4).arrivals
    for _, request in requests_of(arrivals, [[1, 2, 3]] * 2, ANY):
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0.0, 4)
        assert request.sampling.ignore_eos


def test_each_drawn_request_has_a_seed_of_its_own() -> None:
    arrivals = fixed_lengths("", 3, 3, 4).arrivals
    drawn = [request.sampling for _, request in requests_of(arrivals, [[1]] * 3, ANY, Sampling(1.0, 0.5, 7))]
    assert [each.seed for each in drawn] == [7, 8, 9]
    assert {(each.temperature, each.top_p) for each in drawn} == {(1.0, 0.5)}
