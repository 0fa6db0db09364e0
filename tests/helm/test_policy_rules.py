"""Of policies, the chart refuses what `pdserve autoscale validate` refuses, in the same words."""

import json
import re
from base64 import b64decode
from typing import Any

import pytest
import yaml
from helm_chart import CHART, Manifest, helm, of_kind, refusal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from schema_values import Values

from pdserve.autoscaler.pools import DAYS
from pdserve.autoscaler.schema import Policy
from pdserve.base.yaml_models import FieldError

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
POLICY = SCHEMA["properties"]["autoscaling"]["properties"]["policy"]
HEAD = {"apiVersion": "pdserve/v1alpha1", "kind": "AutoscalingPolicy"}
ASKED = '{{ include "pdserve.policyProblems" (list . (index .Values.global.policies %d)) | b64enc }}'
PUBLIC = {"public": {"from": "secret", "existingSecret": "public"}}


def refused(policy: Manifest) -> list[str]:
    """Return what is wrong with a policy, as `pdserve autoscale validate` says it."""
    try:
        Policy.model_validate({**HEAD, **policy})
    except ValidationError as error:
        return sorted(map(_said, _causes(error)))
    return []


def _causes(error: ValidationError) -> list[Any]:
    """Return faults but for those that a tuple is too short, without the members that have faults of their own."""
    return [fault for fault in error.errors() if fault["type"] != "too_short"]


def _said(fault: Any) -> str:  # noqa: ANN401 - pydantic's
    place, cause = [*fault["loc"]], fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return f"{'.'.join(map(str, [*place, *cause.place]))}: {cause.problem}"
    given = "" if isinstance(fault["input"], dict) else f"{fault['input']!r} is refused: "
    problem = fault["msg"].removeprefix("Value error, ").partition(", did you mean")[0]
    if place[-1] == "timeZone":
        given = f"'{fault['input']}' is refused: "  # which Python shows with escapes
    return f"{'.'.join(map(str, place))}: {given}{problem}"


def chart_refused(policies: list[Manifest]) -> list[list[str]]:
    """Return what the chart finds wrong with each of some policies."""
    asked = [
        {"apiVersion": "v1", "kind": "Asked", "metadata": {"name": str(index)}, "found": ASKED % index}
        for index in range(len(policies))
    ]
    values = {"global": {"policies": policies}, "extraObjects": asked, "tls": PUBLIC}
    shown = helm("template", "chat", str(CHART), "--show-only=templates/extra.yaml", "--values=-", values=values).stdout
    found = of_kind(list(yaml.safe_load_all(shown)), "Asked")
    return [sorted(json.loads(b64decode(found[str(index)]["found"]))) for index in range(len(policies))]


def some(pools: Manifest | None = None, **parts: Any) -> Manifest:  # noqa: ANN401 - of a policy
    """Return a policy with some parts in place of its own; `pools`: keys of the pools, over theirs."""
    kept = {name: {"maxReplicas": 4, **(pools or {}).get(name, {})} for name in ("prefill", "decode")}
    return {"objectives": {"ttftMs": 500, "tpotMs": 50}, "budget": {"maxDevices": 8}, "pools": kept, **parts}


def held(**limits: Any) -> Manifest:  # noqa: ANN401 - of a schedule
    return {"start": "08:00", "end": "18:00", **limits}


# For each rule a policy that breaks it alone.
BREAKING = [
    some({"decode": {"minReplicas": 5}}),
    some({"prefill": {"fallback": {"replicas": 5}}}),
    some({"prefill": {"signals": [{"metric": "kv_usage", "target": 1.5}]}}),
    some({"prefill": {"signals": [{"metric": "kv_usage", "target": 0.5}] * 2}}),
    some({"decode": {"schedules": [held()]}}),
    some({"decode": {"schedules": [held(minReplicas=2, end="08:00")]}}),
    some({"decode": {"schedules": [held(minReplicas=2, timeZone="Europe/Berln")]}}),
    some({"decode": {"schedules": [held(minReplicas=5)]}}),
    some({"decode": {"schedules": [held(minReplicas=2), held(minReplicas=3, timeZone="Europe/Berlin")]}}),
    some({"decode": {"schedules": [held(minReplicas=2), held(minReplicas=3, start="18:00", end="08:30")]}}),
    some({"prefill": {"minReplicas": 4}, "decode": {"schedules": [held(minReplicas=4)]}}, budget={"maxDevices": 7}),
    some({"decode": {"minReplicas": 4}, "prefill": {"minReplicas": 4}}, budget={"maxDevices": 7}),
    some({"decode": {"minReplicas": 0}, "prefill": {"minReplicas": 0}}, budget={"maxDevices": 1}),
    some({"decode": {"minReplicas": 2, "schedules": [held(minReplicas=0), held(minReplicas=3)]}}),
    some(budget={"maxDevices": 8, "minDevices": 9}),
    some(budget={"maxDevices": 20, "minDevices": 9}),
    some({"decode": {"fallback": {"replicas": 4}}}, budget={"maxDevices": 3}),
    some({"decode": {"devicesPerReplica": 2}}),
    some(interval={"react": 61}),
    some(interval={"react": "1m1s"}),
    some(interval={"react": "5ms"}),
    some({"decode": {"drainTimeout": "25h"}}),
    some({"decode": {"behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": "31m"}]}}}}),
    some(forecaster={"kind": "holt-winters"}),
    some(forecaster={"season": "1d"}),
    some(forecaster={"kind": "holt-winters", "season": "90s"}),
]


def test_each_rule_is_kept_in_the_same_words() -> None:
    found = [refused(policy) for policy in BREAKING]
    assert [len(problems) for problems in found] == [1] * len(BREAKING)
    assert chart_refused([some(), *BREAKING]) == [[], *found]


@pytest.mark.parametrize("by", ["none", "pdserve", "hpa", "keda"])
def test_a_bad_policy_is_refused_by_its_key(by: str) -> None:
    said = refusal({"autoscaling.by": by, "autoscaling.policy.pools.decode": {"minReplicas": 5, "maxReplicas": 4}})
    assert "autoscaling.policy.pools.decode.minReplicas: 5 is above maxReplicas, 4" in said


NUMBER = re.compile(r"\d+\.\d+(e[-+]?\d+)?")
CLOCKS = [f"{hour:02}:{minute:02}" for hour in range(24) for minute in (0, 30)]
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "Nowhere/Atall"]
SCHEDULE = st.fixed_dictionaries(
    {"start": st.sampled_from(CLOCKS), "end": st.sampled_from([*CLOCKS, "24:00"])},
    optional={
        "minReplicas": st.integers(0, 4),
        "maxReplicas": st.integers(2, 6),
        "timeZone": st.sampled_from(ZONES),
        "daysOfWeek": st.lists(st.sampled_from(DAYS), min_size=1, unique=True),
    },
)
POOL = st.fixed_dictionaries(
    {"maxReplicas": st.integers(3, 6)},
    optional={"minReplicas": st.integers(0, 4), "schedules": st.lists(SCHEDULE, max_size=3)},
)
SCHEDULED = st.builds(
    lambda prefill, decode, most: some({"prefill": prefill, "decode": decode}, budget={"maxDevices": most}),
    *(POOL, POOL, st.integers(3, 12)),
)


def _agree(policies: list[Manifest]) -> None:
    for policy, found in zip(policies, chart_refused(policies), strict=True):
        assert _rounded(found) == _rounded(refused(policy)), policy


def _rounded(problems: list[str]) -> list[str]:
    """Go shows numbers of more than seven digits in other ways than Python."""
    return [NUMBER.sub(lambda found: f"{float(found[0]):.6g}", problem) for problem in problems]


RELAXED: Any = {
    "deadline": None,
    "phases": [Phase.generate],
    "suppress_health_check": [*HealthCheck],
    "print_blob": True,
}


@settings(max_examples=1, derandomize=True, **RELAXED)
@given(st.lists(SCHEDULED, min_size=20, max_size=20))
def test_schedules_that_disagree_at_some_hour_of_a_year_are_found(policies: list[Manifest]) -> None:
    _agree(policies)


@settings(max_examples=1, derandomize=True, **RELAXED)
@given(st.lists(Values(SCHEMA).of(POLICY), min_size=20, max_size=20))
def test_policies_of_the_schema_are_judged_alike(policies: list[Manifest]) -> None:
    _agree(policies)


@pytest.mark.long
@settings(max_examples=25, **RELAXED)
@given(st.lists(SCHEDULED | Values(SCHEMA).of(POLICY), min_size=20, max_size=20))
def test_many_policies_are_judged_alike(policies: list[Manifest]) -> None:
    _agree(policies)
