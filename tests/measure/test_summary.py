"""Every request that was sent is in the denominator of attainment; percentiles interpolate."""

from dataclasses import replace
from math import inf

import pytest

from pdserve.base.errors import ConfigError
from pdserve.measure.outcomes import (
    ANY,
    PARTS,
    Guesses,
    Objective,
    Outcome,
    Percentiles,
    parse_objective,
    part_times,
    percentiles,
    summarize,
)
from pdserve.protocol.drafts import Acceptance


def outcome(sent_s: float, times_s: tuple[float, ...], status: str = "OK", handoff_bytes: int = 0) -> Outcome:
    """Return what came of a request whose tokens came one by one at these times."""
    made = Outcome(sent_s, 10, len(times_s), status=status, handoff_bytes=handoff_bytes, handoff_s=0.003)
    for time_s in times_s:
        made.take(1, time_s)
    made.ended_s = max((sent_s, *times_s))
    return made


def predicted(ttft_s: float, tpot_s: float, told: tuple[float | None, float | None], status: str = "OK") -> Outcome:
    made = outcome(0.0, (ttft_s, ttft_s + tpot_s, ttft_s + 2 * tpot_s), status)
    made.predicted_ttft_s, made.predicted_tpot_s = told
    return made


def test_the_last_percentile_is_the_largest_value_and_none_are_of_nothing() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == Percentiles(2.0, pytest.approx(2.8), pytest.approx(2.98), 3.0)
    assert percentiles([]) is None


def test_times_are_those_that_the_client_saw() -> None:
    one = outcome(1.0, (1.5, 1.6))
    one.take(2, 2.0)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.5 / 3)
    assert sorted(one.itls_s) == pytest.approx([0.0, 0.1, 0.4])


def test_the_mean_gap_is_the_tpot_however_tokens_are_batched() -> None:
    one = outcome(0.0, (1.0,))
    one.take(3, 1.3)
    one.take(1, 1.9)
    assert sum(one.itls_s) / len(one.itls_s) == pytest.approx(one.tpot_s)


def test_failed_requests_count_against_goodput() -> None:
    outcomes = [
        outcome(0.0, (0.1, 0.2)),  # in time
        outcome(0.0, (0.9, 1.0)),  # first token too late
        outcome(0.0, (0.1, 2.0)),  # later tokens too slow
        outcome(0.0, (0.1,), status="UNAVAILABLE"),
        outcome(0.0, (), status="RESOURCE_EXHAUSTED"),
    ]
    summary = summarize("w", outcomes, Objective(ttft_s=0.5, tpot_s=0.2))
    assert summary.duration_s == pytest.approx(2.0)
    assert summary.attainment == pytest.approx(1 / 5)
    assert summary.admitted_attainment == pytest.approx(1 / 4)
    assert summary.goodput_per_s == pytest.approx(1 / 2)
    assert summary.requests_per_s == pytest.approx(3 / 2)
    assert summary.failures == {"UNAVAILABLE": 1, "RESOURCE_EXHAUSTED": 1}
    assert summary.output_tokens_per_s == pytest.approx(7 / 2)


def test_an_answer_with_wrong_tokens_is_no_good_one() -> None:
    wrong = replace(outcome(0.0, (0.1, 0.2)), wrong="token 0 of 2 is 5, 6 was expected")
    summary = summarize("w", [outcome(0.0, (0.1, 0.2)), wrong], ANY, duration_s=1.0)
    assert (summary.requests_per_s, summary.goodput_per_s, summary.attainment) == (1.0, 1.0, 0.5)


def test_a_lone_token_has_no_tpot_to_miss() -> None:
    assert outcome(0.0, (5.0,)).meets(Objective(tpot_s=0.001))
    assert not outcome(0.0, (5.0,)).meets(Objective(ttft_s=0.001))


def test_nothing_measured_gives_no_percentiles() -> None:
    outcomes = [outcome(0.0, (), status="UNAVAILABLE"), outcome(1.0, (), status="UNAVAILABLE")]
    summary = summarize("w", outcomes, ANY)
    assert (summary.ttft_s, summary.tpot_s, summary.itl_s, summary.handoff_s) == (None, None, None, None)
    assert summary.attainment == 0


def test_handoffs_are_counted_where_there_was_one() -> None:
    summary = summarize("w", [outcome(0.0, (1.0,)), outcome(0.0, (1.0, 2.0), handoff_bytes=100)], ANY)
    assert summary.handoff_bytes == 100
    assert summary.handoff_s is not None
    assert summary.handoff_s.p50 == 0.003


def test_guesses_are_added_up_by_source_and_place() -> None:
    some, others = outcome(0.0, (1.0,)), outcome(0.0, (1.0,), "UNAVAILABLE")
    some.drafts = {"ngram": Acceptance(3, 12, [2, 1])}
    others.drafts = {"ngram": Acceptance(1, 4, [1, 1, 1]), "suffix": Acceptance(1, 2, [])}
    assert summarize("w", [some, others, outcome(0.0, (1.0,))], ANY).guesses == {
        "ngram": Guesses(16, 6, 2.5, (0.75, 0.5, 0.25)),
        "suffix": Guesses(2, 0, 1.0, ()),
    }


def test_errors_are_relative_to_what_the_client_saw() -> None:
    outcomes = [predicted(1.0, 0.1, (1.5, 0.08)), predicted(2.0, 0.1, (2.2, 0.1)), predicted(1.0, 0.2, (0.7, 0.2))]
    found = summarize("a", outcomes, ANY)
    assert found.ttft_error is not None
    assert found.tpot_error is not None
    assert found.ttft_error.p50 == pytest.approx(0.3)
    assert found.ttft_error.ratio_p50 == pytest.approx(1.1)
    assert found.tpot_error.p50 == pytest.approx(0.0)
    assert found.tpot_error.p90 == pytest.approx(0.16)


def test_nothing_is_said_of_what_was_not_predicted_or_did_not_end_well() -> None:
    outcomes = [predicted(1.0, 0.1, (None, None)), predicted(1.0, 0.1, (9.0, 9.0), "UNAVAILABLE")]
    found = summarize("a", outcomes, ANY)
    assert (found.num_requests, found.ttft_error, found.tpot_error) == (2, None, None)


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("ttft:500 tpot:50", Objective(0.5, 0.05)),
        ("tpot:20", Objective(inf, 0.02)),
        (" ttft:1.5 ", Objective(0.0015, inf)),
        ("", ANY),
    ],
)
def test_objectives_are_written_as_milliseconds(text: str, objective: Objective) -> None:
    assert parse_objective(text) == objective


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:3", "ttft:0", "tpot:-1", "ttft:nan", "ttft=3"])
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_objective(text)


STAGES = {
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
    times = part_times(STAGES)
    assert sum(times[name] for name in list(PARTS)[:4]) == STAGES["first_token"]
    assert sum(times[name] for name in list(PARTS)[4:]) == STAGES["decode_joined"] - STAGES["prefill_done"]
    late = part_times({**STAGES, "granted": 13.0})
    assert (late["wait for a grant"], late["until landed"]) == (3.0, 1.0)


def test_a_request_without_a_hand_off_has_only_the_parts_before_the_first_token() -> None:
    stages = {name: STAGES[name] for name in ("received", "placed", "prefill_started", "prefill_done", "first_token")}
    assert list(part_times(stages)) == list(PARTS)[:4]


def test_parts_are_of_requests_that_ended_well() -> None:
    good = replace(outcome(0.0, (0.1,)), stages_s=STAGES)
    bad = replace(outcome(0.0, (), "UNAVAILABLE"), stages_s={"received": 0.0, "placed": 900.0})
    assert summarize("w", [good, bad], ANY).parts_s["placed"].p99 == 2.0
