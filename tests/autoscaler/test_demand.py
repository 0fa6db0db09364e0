"""Demand is counted by size, and told apart by time."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol.reports import NUM_BANDS, Demand, band_of, middle_of


@given(st.integers(1, 1 << 22))
def test_a_length_is_near_the_middle_of_its_band(num_tokens: int) -> None:
    assert 1 / 1.2 <= middle_of(band_of(num_tokens)) / num_tokens <= 1.5 or num_tokens < 3


def test_no_length_is_beyond_the_bands() -> None:
    assert band_of(0) == 0
    assert band_of(1 << 40) == NUM_BANDS - 1


def test_counts_are_taken_apart_by_time_and_put_together_by_router() -> None:
    bands = tuple(range(NUM_BANDS))
    first = Demand(num_requests=3, prompt_tokens=30, prompts=bands, num_within_both=2)
    second = first + Demand(num_requests=2, prompt_tokens=5, prompts=bands, num_within_both=1)
    assert second.since(first) == Demand(num_requests=2, prompt_tokens=5, prompts=bands, num_within_both=1)


def test_a_router_that_started_again_has_seen_all_that_it_counts() -> None:
    assert Demand(num_requests=2).since(Demand(num_requests=3)) == Demand(num_requests=2)
    answers = (0, 1, *(0,) * (NUM_BANDS - 2))
    busier = Demand(num_requests=9, answers=answers)
    assert busier.since(Demand(num_requests=3, answers=(1, *answers[1:]))) == busier
