"""Every request that was sent is in the denominator of attainment; percentiles are those of numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.ladder import PARTS, part_times
from pdserve.bench.summary import Sample, Slo, parse_slo, percentile, summarize
from pdserve.errors import ConfigError


def sample(sent_s: float, times_s: tuple[float, ...], status: str = "OK", handoff_bytes: int = 0) -> Sample:
    ended_s = max((sent_s, *times_s))
    return Sample(sent_s, times_s, ended_s, status, prompt_len=10, handoff_bytes=handoff_bytes, handoff_ms=3.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


def test_times_are_those_that_the_client_saw() -> None:
    one = sample(1.0, (1.5, 1.6, 1.6, 2.0))
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.5 / 3)
    assert one.itls_s == pytest.approx((0.1, 0.0, 0.4))


def test_the_mean_gap_is_the_tpot_however_tokens_are_batched() -> None:
    one = sample(0.0, (1.0, 1.3, 1.3, 1.3, 1.9))
    assert sum(one.itls_s) / len(one.itls_s) == pytest.approx(one.tpot_s)


def test_failed_requests_count_against_goodput() -> None:
    samples = [
        sample(0.0, (0.1, 0.2)),  # in time
        sample(0.0, (0.9, 1.0)),  # first token too late
        sample(0.0, (0.1, 2.0)),  # later tokens too slow
        sample(0.0, (0.1,), status="UNAVAILABLE"),
        sample(0.0, (), status="RESOURCE_EXHAUSTED"),
    ]
    summary = summarize("w", samples, Slo(ttft_ms=500, tpot_ms=200))
    assert summary.duration_s == pytest.approx(2.0)
    assert summary.attainment == pytest.approx(1 / 5)
    assert summary.goodput_per_s == pytest.approx(1 / 2)
    assert summary.requests_per_s == pytest.approx(3 / 2)
    assert summary.failures == {"UNAVAILABLE": 1, "RESOURCE_EXHAUSTED": 1}
    assert summary.output_tokens_per_s == pytest.approx(7 / 2)


def test_a_lone_token_has_no_tpot_to_miss() -> None:
    assert Slo(tpot_ms=1).is_met(sample(0.0, (5.0,)))
    assert not Slo(ttft_ms=1).is_met(sample(0.0, (5.0,)))


def test_nothing_measured_gives_no_percentiles() -> None:
    summary = summarize("w", [sample(0.0, (), status="UNAVAILABLE"), sample(1.0, (), status="UNAVAILABLE")], Slo())
    assert (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.handoff_ms) == (None, None, None, None)
    assert summary.attainment == 0


def test_handoffs_are_counted_where_there_was_one() -> None:
    summary = summarize("w", [sample(0.0, (1.0,)), sample(0.0, (1.0, 2.0), handoff_bytes=100)], Slo())
    assert summary.handoff_bytes == 100
    assert summary.handoff_ms is not None
    assert summary.handoff_ms.p50 == 3.0


@pytest.mark.parametrize(
    ("text", "slo"),
    [("ttft=500,tpot=50", Slo(500, 50)), ("tpot=20", Slo(None, 20)), (" ttft = 1.5 ", Slo(1.5, None))],
)
def test_objectives_are_written_as_milliseconds(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "itl=3", "ttft=0", "tpot=-1", "ttft=nan"])
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


RUNGS = {
    "received": 0.0,
    "tokenized": 1.0,
    "placed": 2.0,
    "granted": 5.0,
    "prefill_started": 4.0,
    "prefill_done": 10.0,
    "first_token": 11.0,
    "landed": 14.0,
    "committed": 16.0,
    "decode_joined": 20.0,
}


def test_parts_add_up_to_the_first_token_and_to_the_first_decode_step() -> None:
    times = part_times(RUNGS)
    assert sum(times[name] for name in list(PARTS)[:4]) == RUNGS["first_token"]
    assert sum(times[name] for name in list(PARTS)[4:]) == RUNGS["decode_joined"] - RUNGS["prefill_done"]
    late = part_times({**RUNGS, "granted": 13.0})
    assert (late["wait for a grant"], late["until landed"]) == (3.0, 1.0)


def test_a_request_without_a_hand_off_has_only_the_parts_before_the_first_token() -> None:
    rungs = {name: RUNGS[name] for name in ("received", "placed", "prefill_started", "prefill_done", "first_token")}
    assert list(part_times(rungs)) == list(PARTS)[:4]


def test_parts_are_of_requests_that_ended_well() -> None:
    good = Sample(0.0, (0.1,), 0.1, "OK", 10, rungs_ms=RUNGS)
    bad = Sample(0.0, (), 0.1, "UNAVAILABLE", 10, rungs_ms={"received": 0.0, "placed": 900.0})
    summary = summarize("w", [good, bad], Slo())
    assert summary.parts_ms["placed"].p99 == 2.0
