"""Demand is counted by size, and told apart by time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.autoscaler.observation import Capacity
from pdserve.autoscaler.sizing import DecodePool
from pdserve.autoscaler.traffic import DecayingCounts, Traffic, mean
from pdserve.perfmodel.curve import Curve, DecodePiece, StepCosts
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


def traffic_of(*kinds: tuple[int, int, int]) -> Traffic | None:
    """Return the stream of so many requests a second, of so many prompt tokens; answer tokens 0: for vectors."""
    counts = DecayingCounts(1e9)
    for rate, prompt, answer in kinds:
        prompts, answers = [0] * NUM_BANDS, [0] * NUM_BANDS
        prompts[band_of(prompt)] = 100 * rate
        answers[band_of(answer)] = 100 * rate if answer else 0
        num_pooled = 0 if answer else 100 * rate
        counts.add(
            Demand(
                num_requests=100 * rate,
                prompt_tokens=100 * rate * prompt,
                prompts=tuple(prompts),
                answers=tuple(answers),
                num_pooled=num_pooled,
                pooled_tokens=num_pooled * prompt,
            ),
            0.0,
        )
    counts.add(Demand(), 100.0)
    return counts.traffic()


@pytest.mark.parametrize(("chats", "vectors"), [((5, 200, 300), (45, 8000, 0)), ((5, 8000, 300), (45, 100, 0))])
def test_vectors_change_nothing_of_the_stream_that_decodes(
    chats: tuple[int, int, int], vectors: tuple[int, int, int]
) -> None:
    costs = StepCosts(Curve(0.0, 1e-4, 0.0), (DecodePiece(None, Curve(0.02, 0.0, 0.0)),))
    capacity = Capacity(60_000, 64, 2048, 16)
    sizes = []
    for traffic in (traffic_of(chats), traffic_of(chats, vectors)):
        assert traffic is not None
        pool = DecodePool(traffic, costs, capacity, 0.1)
        sizes.append(next(size for size in range(1, 99) if pool.attainment(size) > 0.95))
        assert traffic.answer_rate == pytest.approx(5.0, rel=0.01)
    assert abs(sizes[0] - sizes[1]) <= 1  # lengths are counted in bands where an answer follows each prompt
    assert traffic.prompt_rate == pytest.approx(50.0, rel=0.01)


def test_vectors_alone_are_a_stream_that_decodes_nothing() -> None:
    traffic = traffic_of((45, 100, 0))
    assert traffic is not None
    assert (traffic.answer_rate, mean(traffic.answers)) == (0.0, 1.0)
    assert traffic.prompt_rate == pytest.approx(45.0, rel=0.01)
