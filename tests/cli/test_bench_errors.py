"""Errors of predictions, and the lengths that experiments send."""

from pathlib import Path

import pytest

from pdserve.bench.errors import accuracy
from pdserve.bench.summary import Sample
from pdserve.errors import ConfigError
from pdserve.experiments.lengths import mean_tokens, read_lengths


def sample(ttft_s: float, tpot_s: float, predicted: tuple[float | None, float | None], status: str = "OK") -> Sample:
    times_s = (ttft_s, ttft_s + tpot_s, ttft_s + 2 * tpot_s)
    return Sample(0.0, times_s, times_s[-1], status, 10, predicted_ttft_s=predicted[0], predicted_tpot_s=predicted[1])


def test_errors_are_relative_to_what_the_client_saw() -> None:
    samples = [sample(1.0, 0.1, (1.5, 0.08)), sample(2.0, 0.1, (2.2, 0.1)), sample(1.0, 0.2, (0.7, 0.2))]
    found = accuracy("a", samples)
    assert found.ttft is not None
    assert found.tpot is not None
    assert found.ttft.median_error == pytest.approx(0.3)
    assert found.ttft.median_ratio == pytest.approx(1.1)
    assert found.tpot.median_error == pytest.approx(0.0)
    assert found.tpot.p90_error == pytest.approx(0.16)


def test_nothing_is_said_of_what_was_not_predicted_or_did_not_end_well() -> None:
    found = accuracy("a", [sample(1.0, 0.1, (None, None)), sample(1.0, 0.1, (9.0, 9.0), "UNAVAILABLE")])
    assert (found.num_requests, found.ttft, found.tpot) == (2, None, None)


def test_requests_come_at_the_rate_asked_for_with_the_lengths_of_the_workload() -> None:
    lengths = read_lengths("800x80", 0.5, 1000, 0)
    arrivals = lengths.poisson(20.0, 100.0, 3)
    assert 1850 < len(arrivals) < 2150
    assert arrivals[-1].start_s <= 100.0
    prompt, output = mean_tokens(arrivals)
    assert (prompt, output) == (pytest.approx(400, rel=0.1), pytest.approx(40, rel=0.1))
    assert max(arrival.prompt_len for arrival in arrivals) <= 1000


def test_a_workload_is_a_file_or_two_lengths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workload: 'many' is neither a trace nor INxOUT"):
        read_lengths("many", 1.0, 100, 0)
    broken = tmp_path / "trace.json"
    broken.write_text('[{"start_time": 0, "prompt_len": 0, "output_len": 3}]')
    with pytest.raises(ConfigError, match=r"trace.json, entry 0: prompt_len"):
        read_lengths(str(broken), 1.0, 100, 0)
