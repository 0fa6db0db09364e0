"""What a measurement sends."""

from pdserve.measure.client import Sampling, requests_of
from pdserve.measure.outcomes import ANY
from pdserve.measure.workload import fixed_lengths


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
