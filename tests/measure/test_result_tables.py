"""Every measurement has a table and JSON: a row or column for each result, and numbers that JSON can hold."""

import json
from math import inf

import pytest
from cluster_states import printed

from pdserve.capacity.replay import replay_table
from pdserve.measure.accuracy import Accuracy, accuracy_json, error_table
from pdserve.measure.cancel import Freed, cancel_table
from pdserve.measure.chaos import Fault, Verdict, chaos_json, chaos_table, failures, tally
from pdserve.measure.handoff import Cost, handoff_table
from pdserve.measure.live import Findings, LoadRun
from pdserve.measure.outcomes import Objective, Outcome
from pdserve.measure.overload import overload_table
from pdserve.measure.router_speed import PolicySpeed, speed_table
from pdserve.measure.routers import LateRouter, RouterFindings, routers_tables
from pdserve.measure.summary import Percentiles, summarize, summary_tables
from pdserve.measure.tables import as_json

OBJECTIVE = Objective(ttft_s=0.5)
TIMES = Percentiles(0.25, 0.5, 0.75, 1.0)


def served(wrong: str = "") -> Outcome:
    made = Outcome(0.0, 10, 2, status="OK", predicted_ttft_s=0.125, predicted_tpot_s=0.1, wrong=wrong)
    made.take(1, 0.1)
    made.take(1, 0.2)
    made.ended_s = 0.2
    return made


OUTCOMES = [served(), Outcome(0.0, 10, 2, status="RESOURCE_EXHAUSTED", ended_s=0.01, retry_after_s=1.0)]
RUNS = tuple(LoadRun(load, summarize(name, OUTCOMES, OBJECTIVE)) for load in (0.5, 1.0) for name in ("a", "b"))
FINDINGS = Findings("work", 10.0, OBJECTIVE, RUNS)
LATE = LateRouter("router-1", 1.0, 2.0, 3, 4, 0.5, 0.75)
FAULTS = (Fault("decode-0", 1, 0.5, was_attached=True, noticed_s=0.25),)
VERDICT = Verdict(tally("chaos", [served(), served("token 0")]), FAULTS, TIMES, None, "a page", 1, {"OK": 2})


@pytest.mark.parametrize(
    ("table", "cells"),
    [
        (summary_tables([run.summary for run in RUNS])[0], ("TTFT p50 ms", "100.0", "1 RESOURCE_EXHAUSTED")),
        (error_table(FINDINGS), ("capacity 10.00 requests/s", "25.0%", "1.25")),
        (overload_table(FINDINGS), ("TTFT 500 ms", "50.0%", "10 ms", "100%", "keeps 100% of its best goodput")),
        (replay_table(FINDINGS), ("100 / 100 / 100",)),
        (routers_tables(RouterFindings((LATE,), FINDINGS))[0], ("router-1", "3 of 4")),
        (cancel_table([Freed("mid-decode", "decode", 7, TIMES)]), ("mid-decode", "7", "0.25", "0.75", "1.00")),
        (chaos_table([VERDICT, VERDICT]), ("wrong tokens", "noticed max s", "a page", "goodput, share of the first")),
        (speed_table([PolicySpeed("goodput", 3500.0, 2e-4)], "title"), ("3,500", "200")),
        (handoff_table([Cost(64, 4, 1.0, 2.0, 2.0, 0.5, 9.0, 1e9)], tcp=True), ("64", "9.00", "1,000", "TCP")),
    ],
)
def test_a_table_has_what_was_found(table: object, cells: tuple[str, ...]) -> None:
    text = printed(table)
    assert [cell for cell in cells if cell not in text] == []


def test_wrong_answers_are_listed() -> None:
    assert failures([VERDICT]) == ["chaos: request 0: token 0"]


@pytest.mark.parametrize("found", [FINDINGS, accuracy_json(Accuracy(FINDINGS, (OUTCOMES,) * 4)), chaos_json([VERDICT])])
def test_results_are_json_with_runs_whose_summaries_name_their_units(found: object) -> None:
    runs = json.loads(as_json(found))["runs"]
    for run in runs:
        assert run["summary"]["ttft_s"] == {"p50": 0.1, "p90": 0.1, "p99": 0.1, "max": 0.1}
        assert {"num_requests", "goodput_per_s", "attainment", "tpot_s", "itl_s"} <= run["summary"].keys()


def test_what_is_infinite_or_undefined_is_null() -> None:
    assert json.loads(as_json({"objective": Objective(tpot_s=inf), "times": [float("nan"), 1.5]})) == {
        "objective": {"ttft_s": None, "tpot_s": None},
        "times": [None, 1.5],
    }
