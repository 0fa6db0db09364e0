"""Counts become rates and lengths, of which older ones weigh less, and scatter is no evidence."""

import pytest

from pdserve.autoscaler.traffic import DecayingCounts, mean
from pdserve.protocol.reports import NUM_BANDS, Demand, band_of


def demand(count: int, prompt: int = 1000, answer: int = 100, cached: int = 0) -> Demand:
    prompts, answers = [0] * NUM_BANDS, [0] * NUM_BANDS
    prompts[band_of(prompt)] = answers[band_of(answer)] = count
    return Demand(count, count * (prompt + cached), count * cached, 0, tuple(prompts), tuple(answers))


def test_a_stream_has_its_rate_its_lengths_and_what_nobody_computes() -> None:
    counts = DecayingCounts(60.0)
    assert counts.traffic() is None
    for _ in range(30):
        counts.add(demand(20, cached=500), 5.0)
    traffic = counts.traffic()
    assert traffic is not None
    assert traffic.prompt_rate == traffic.answer_rate == pytest.approx(4.0)
    assert mean(traffic.prompts) == pytest.approx(1000, rel=0.2)
    assert mean(traffic.answers) == pytest.approx(100, rel=0.2)
    assert traffic.cached_tokens == pytest.approx(500)


def test_what_came_long_ago_is_forgotten() -> None:
    counts = DecayingCounts(20.0)
    counts.add(demand(1000, prompt=8000), 5.0)
    for _ in range(40):
        counts.add(demand(5, prompt=100), 5.0)
    traffic = counts.traffic()
    assert traffic is not None
    assert counts.rate == pytest.approx(1.0, rel=0.05)
    assert mean(traffic.prompts) < 200


def test_lengths_are_remembered_while_nothing_comes() -> None:
    counts = DecayingCounts(20.0)
    counts.add(demand(100), 5.0)
    before = counts.traffic()
    for _ in range(100):
        counts.add(Demand(), 5.0)
    after = counts.traffic()
    assert before is not None
    assert after is not None
    assert after.prompts == before.prompts
    assert after.prompt_rate < 1e-6


@pytest.mark.parametrize(("count", "least"), [(0, 0.0), (1, 0.0), (4, 0.17), (100, 0.83), (10_000, 0.98)])
def test_few_requests_are_weak_evidence_of_their_rate(count: int, least: float) -> None:
    counts = DecayingCounts(60.0)
    counts.add(demand(count), 10.0)
    mixture = DecayingCounts(60.0)
    mixture.add(demand(1), 1.0)
    traffic = mixture.traffic()
    assert traffic is not None
    prompts, answers = counts.sure_rates(traffic)
    assert answers == pytest.approx(count / 10 * least, rel=0.05, abs=0.01)
    assert prompts == pytest.approx(answers, rel=0.05, abs=0.01)


def test_a_few_long_prompts_are_weaker_evidence_than_many_short_ones() -> None:
    short, long, mixture = DecayingCounts(60.0), DecayingCounts(60.0), DecayingCounts(60.0)
    short.add(demand(160, prompt=1000), 10.0)
    long.add(demand(10, prompt=16_000), 10.0)
    mixture.add(demand(1, prompt=1000), 1.0)
    traffic = mixture.traffic()
    assert traffic is not None
    assert long.sure_rates(traffic)[0] < 0.7 * short.sure_rates(traffic)[0]
