"""Every measurement has a table and JSON of the same fields: numbers that JSON can hold, and units that can be read."""

import json
from itertools import product
from math import inf

import pytest
from cluster_states import printed

from pdserve.base.errors import CommandError
from pdserve.cli.results import fail_unless_right
from pdserve.measure.chaos import Fault, Verdict, tally
from pdserve.measure.frontend import FrontendCost, Load
from pdserve.measure.outcomes import ANY, Objective, Outcome, Percentiles, summarize
from pdserve.measure.overload import Findings
from pdserve.measure.streams import Api
from pdserve.measure.tables import as_json, compared

OBJECTIVE = Objective(ttft_s=0.5)
TIMES = Percentiles(0.25, 0.5, 0.75, 1.0)


def served(wrong: str = "") -> Outcome:
    made = Outcome(0.0, 10, 2, status="OK", predicted_ttft_s=0.125, predicted_tpot_s=0.1, wrong=wrong)
    made.take(1, 0.1)
    made.take(1, 0.2)
    made.ended_s = 0.2
    return made


OUTCOMES = [served(), Outcome(0.0, 10, 2, status="RESOURCE_EXHAUSTED", ended_s=0.01, retry_after_s=1.0)]
FINDINGS = Findings("work", 10.0, OBJECTIVE, (summarize("50%", OUTCOMES, OBJECTIVE),))
FAULTS = (Fault("decode-0", 1, 0.5, was_attached=True, noticed_s=0.25),)
VERDICT = Verdict(tally("chaos", [served(), served("token 0")]), FAULTS, TIMES, None, "a page", 1, {"OK": 2})


def cells(result: object) -> dict[str, str]:
    """Return the cells of a result's column, by their rows."""
    return {row: cell for row, (cell,) in compared([result]).rows}


@pytest.mark.parametrize(
    ("field", "value", "row"),
    [
        ("ttft_s", 0.0123, ("ttft", "12.3 ms")),
        ("duration_s", 61.25, ("duration", "61.2 s")),
        ("requests_per_s", 8.8341, ("requests per s", "8.83")),
        ("ask_us", 2.5, ("ask us", "2.5")),
        ("noticed_s", TIMES, ("noticed: p50 / p90 / p99 / max", "250 / 500 / 750 / 1000 ms")),
        ("parts_s", {"placed": TIMES}, ("parts placed: p50 / p90 / p99 / max", "250 / 500 / 750 / 1000 ms")),
        ("handoff_bytes", 12_345_678, ("handoff bytes", "12.3 MB")),
        ("failures", {"OK": 3, "UNAVAILABLE": 1}, ("failures", "3 OK, 1 UNAVAILABLE")),
        ("failures", {}, ("failures", "none")),
        ("utilization", {"prefill": 0.5, "decode": 0.25}, ("utilization: prefill / decode", "0.5 / 0.25")),
        ("free_after_s", None, ("free after", "-")),
        ("left_over", "", ("left over", "-")),
        ("keeps_up", False, ("keeps up", "no")),
    ],
)
def test_a_row_is_named_after_its_field_and_shows_its_unit(field: str, value: object, row: tuple[str, str]) -> None:
    assert list(cells({field: value}).items()) == [row]


def test_longer_lists_are_left_to_the_json() -> None:
    assert cells({"sizes": [1.0, 2.0, 3.0], "outcomes": []}) == {}


def test_results_stand_beside_each_other_and_what_one_lacks_is_a_dash() -> None:
    table = compared([{"name": "a", "x": 1, "y": 2}, {"name": "b", "y": 3}], "title")
    assert (table.title, table.runs) == ("title", ["a", "b"])
    assert list(table.rows) == [("x", ["1", "-"]), ("y", ["2", "3"])]
    assert printed(table).splitlines()[0] == "title"


def test_many_loads_of_a_router_fit_into_a_hundred_columns() -> None:
    kinds = product((0.02, 0.002), (Api.GRPC, Api.COMPLETIONS), (64, 256), (64, 8))
    loads = [Load(door, step_s, streams, tokens, 4) for step_s, door, streams, tokens in kinds]
    costs = [
        FrontendCost(str(load), load, {"median": s, "least": s / 2, "most": 2 * s}, s / 3, 65.0, 1234.5, TIMES)
        for s, load in enumerate(loads, 1)
    ]
    lines = printed(compared(costs, "Prompts of 200 words"), 100).splitlines()
    assert len(loads) == 16
    assert all(len(line) <= 100 for line in lines)
    words = " ".join(lines)
    assert all(door in words for door in ("grpc,", "completions,"))


def test_percentiles_that_one_result_lacks_have_one_row() -> None:
    table = compared([{"name": "a", "ttft_s": None}, {"name": "b", "ttft_s": TIMES}])
    assert list(table.rows) == [("ttft: p50 / p90 / p99 / max", ["-", "250 / 500 / 750 / 1000 ms"])]


def test_the_table_of_a_load_has_the_fields_of_its_json() -> None:
    (run,) = json.loads(as_json(FINDINGS))["runs"]
    assert run["ttft_s"] == {"p50": 0.1, "p90": 0.1, "p99": 0.1, "max": 0.1}
    assert run["failures"] == {"RESOURCE_EXHAUSTED": 1}
    shown = cells(FINDINGS.runs[0])
    assert shown["ttft: p50 / p90 / p99 / max"] == "100 / 100 / 100 / 100 ms"
    assert shown["ttft error: num predicted / p50 / p90 / ratio p50"] == "1 / 0.25 / 0.25 / 1.25"
    assert (shown["attainment"], shown["refused"], shown["retry after"]) == ("0.5", "0.5", "1")


def test_the_verdict_of_a_chaos_run_is_on_one_level() -> None:
    shown = cells(VERDICT.result)
    assert (shown["num right"], shown["num wrong"], shown["num hit"]) == ("1", "1", "1")
    assert (shown["failures"], shown["left over"]) == ("1 WRONG", "a page")
    assert not VERDICT.is_clean


def test_wrong_answers_are_listed() -> None:
    assert VERDICT.tally.problems == ["chaos: request 0: token 0"]


def test_a_measurement_fails_where_requests_failed_and_not_where_they_were_refused() -> None:
    fail_unless_right([summarize("refused", OUTCOMES, ANY)])
    lost = Outcome(0.0, 10, 2, status="UNAVAILABLE", ended_s=0.01)
    for outcomes, words in (([lost], "half: 1 UNAVAILABLE"), ([served("1 of 2 tokens came")], "half: 1 WRONG")):
        with pytest.raises(CommandError, match=words):
            fail_unless_right([summarize("half", [*OUTCOMES, *outcomes], ANY)])


def test_what_is_infinite_or_undefined_is_null() -> None:
    assert json.loads(as_json({"objective": Objective(tpot_s=inf), "times": [float("nan"), 1.5]})) == {
        "objective": {"ttft_s": None, "tpot_s": None},
        "times": [None, 1.5],
    }
