"""Nonsense policies are refused by file, line, field and limit before anything starts; changes are named."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pdserve.autoscaler.explain import changes
from pdserve.autoscaler.loop import PolicyFile
from pdserve.autoscaler.pools import DAYS, Schedule, holds
from pdserve.autoscaler.schema import Policy, load
from pdserve.base.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
GOOD = """\
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 500, tpotMs: 50}
budget: {maxDevices: 8}
interval: {forecast: 60s, react: 5s}
forecaster: {kind: kalman}
pools:
  prefill:
    maxReplicas: 4
    startup: 30s
    schedules:
      - {start: "08:00", end: "18:00", timeZone: Europe/Zurich, minReplicas: 2}
      - {start: 17:30, end: 20:00, timeZone: Europe/Zurich, maxReplicas: 3}
  decode:
    minReplicas: 2
    maxReplicas: 4
    devicesPerReplica: 2
    signals: [{metric: kv_usage, target: 0.8}]
actuator: {kind: ray}
roleSwitch: {enabled: false}
"""

FAULTS = [
    ("kind: kalman", "kind: kalmann", "line 6: forecaster.kind: 'kalmann' is refused: Input should be 'last', "),
    (
        "minReplicas: 2\n    max",
        "minReplicas: 5\n    max",
        "line 15: pools.decode.minReplicas: 5 is above maxReplicas, 4",
    ),
    ("maxReplicas: 4\n    startup", "maxReplicas: 0\n    startup", "line 9: pools.prefill.maxReplicas: 0 is refused"),
    ("    maxReplicas: 4\n    dev", "    maxReplica: 4\n    dev", "unknown key, did you mean maxReplicas?"),
    ("startup: 30s", "startup: -30s", "line 10: pools.prefill.startup: '-30s' is refused: a duration is a number of"),
    (
        "startup: 30s",
        "startup: -30",
        "line 10: pools.prefill.startup: -30 is refused: Input should be greater than or equal",
    ),
    ("startup: 30s", "startup_s: 30", "line 10: pools.prefill.startup_s: unknown key, did you mean startup?"),
    (
        "maxDevices: 8",
        "maxDevices: 5",
        "line 4: budget.maxDevices: 5 is below 6, what both pools need at least on Mon",
    ),
    ("maxDevices: 8", "maxDevices: 8, minDevices: 9", "line 4: budget.minDevices: 9 is above maxDevices, 8"),
    ("maxDevices: 8", "maxDevices: 99, minDevices: 13", "budget.minDevices: 13 is above 12, what both pools hold at"),
    ("maxDevices: 8", "maxDevices: 8.5", "line 4: budget.maxDevices: 8.5 is refused"),
    ("maxDevices: 8", "maxDevices: yes", "line 4: budget.maxDevices: True is refused"),
    (
        "maxReplicas: 3}",
        "minReplicas: 3}",
        "line 13: pools.prefill.schedules.1: asks for 3 as minReplicas, and schedules.0 ",
    ),
    (
        "maxReplicas: 3}",
        "maxReplicas: 1}",
        "line 13: pools.prefill.schedules.1: minReplicas, 2, is above maxReplicas, 1,",
    ),
    (
        "minReplicas: 2}",
        "minReplicas: 5}",
        "line 12: pools.prefill.schedules.0: minReplicas, 5, is above maxReplicas, 4",
    ),
    (", minReplicas: 2}", "}", "line 12: pools.prefill.schedules.0: sets neither minReplicas nor maxReplicas"),
    ("Europe/Zurich, min", "Europe/Zürich, min", "is no time zone, did you mean Europe/Zurich?"),
    ("Europe/Zurich, min", "../UTC, min", "line 12: pools.prefill.schedules.0.timeZone: '../UTC' is refused"),
    ('"18:00"', '"08:00"', "line 12: pools.prefill.schedules.0.end: 08:00 is the start as well"),
    ('"18:00"', '"25:00"', "line 12: pools.prefill.schedules.0.end: '25:00' is refused"),
    ('"18:00"', '"1٨:00"', "line 12: pools.prefill.schedules.0.end: '1٨:00' is refused"),
    ("startup: 30s", "startup: ٣0s", "line 10: pools.prefill.startup: '٣0s' is refused"),
    ("17:30", "17:30, daysOfWeek: []", "line 13: pools.prefill.schedules.1.daysOfWeek"),
    ("17:30", "17:30, daysOfWeek: [Mo]", "line 13: pools.prefill.schedules.1.daysOfWeek.0: 'Mo' is refused"),
    ("kind: kalman", "kind: holt-winters", "line 6: forecaster.season: is what holt-winters needs"),
    ("kind: kalman", "kind: last, season: 1d", "line 6: forecaster.season: is what holt-winters needs"),
    ("kind: kalman", "kind: holt-winters, season: 90s", "forecaster.season: 90s is 1.5 times interval.forecast, 60s"),
    ("react: 5s", "react: 2m", "line 5: interval.react: 120s is above interval.forecast, 60s"),
    ("target: 0.8", "target: 80", "line 18: pools.decode.signals.0.target: 80 is above 1, the greatest kv_usage"),
    (
        "0.8}",
        "0.8}, {metric: kv_usage, target: 0.9}",
        "line 18: pools.decode.signals.1.metric: kv_usage is there twice",
    ),
    ("metric: kv_usage", "metric: kv", "line 18: pools.decode.signals.0.metric: 'kv' is refused"),
    (
        "startup: 30s",
        "fallback: {replicas: 5}",
        "line 10: pools.prefill.fallback.replicas: 5 is not between minReplicas",
    ),
    (
        "startup: 30s",
        "behavior: {scaleup: {}}",
        "line 10: pools.prefill.behavior.scaleup: unknown key, did you mean scaleUp?",
    ),
    (
        "startup: 30s",
        "behavior: {scaleUp: {policies: []}}",
        "line 10: pools.prefill.behavior.scaleUp.policies: Tuple should",
    ),
    (
        "kind: ray",
        "kind: rey",
        "line 19: actuator.kind: 'rey' is refused: must be one of 'process', 'ray', 'kubernetes'",
    ),
    ("kind: ray", "kind: ray, namespaces: x", "line 19: actuator.namespaces: unknown key, did you mean namespace?"),
    ("kind: ray", "kind: kubernetes, decode: {name: d}", "line 19: actuator.prefill: is required"),
    ("v1alpha1", "v1", "line 1: apiVersion: 'pdserve/v1' is refused: Input should be 'pdserve/v1alpha1'"),
    (
        "devicesPerReplica: 2",
        'devicesPerReplica: 2\n    schedules: [{start: "01:00", end: "02:00", minReplicas: 5}]',
        "line 18: pools.decode.schedules.0: minReplicas, 5, is above maxReplicas, 4, on Mon at 01:00 UTC",
    ),
    (
        "enabled: false",
        "enabled: true",
        "line 20: roleSwitch.enabled: must be false where devicesPerReplica of the pools",
    ),
    ("ttftMs: 500, ", "", "line 3: objectives.ttftMs: is required"),
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize(("old", "new", "message"), FAULTS, ids=[new[:40] for _, new, _ in FAULTS])
def test_nonsense_is_refused_by_name(write: Callable[[str], Path], old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        load(write(GOOD.replace(old, new)))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{write(GOOD)}, line ")


def test_the_page_shows_messages_that_there_are(write: Callable[[str], Path]) -> None:
    found = set()
    for old, new, _ in FAULTS:
        path = write(GOOD.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            load(path)
        found.add(str(caught.value).replace(str(path), "policy.yaml").partition("; ")[0])
    shown = re.findall(r"^    (policy\.yaml, line .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) > 3
    assert set(shown) <= found


def test_every_fault_is_named_at_once(write: Callable[[str], Path]) -> None:
    text = GOOD.replace("startup: 30s", "startup: -1").replace("maxDevices: 8", "maxDevices: 0")
    with pytest.raises(ConfigError, match=r"line 4: budget.maxDevices: 0 .*; line 10: pools.prefill.startup: -1 "):
        load(write(text))


def test_a_changed_policy_says_what_changed(write: Callable[[str], Path]) -> None:
    file = PolicyFile(write(GOOD), lambda _: ())
    running = file.policy
    text = (
        GOOD.replace("startup: 30s", "startup: 90s")
        .replace("{maxDevices: 8}", "{maxDevices: 10}\nmode: advisory")
        .replace(", {metric: kv_usage, target: 0.8}", "")
        .replace("signals: [{metric: kv_usage, target: 0.8}]", "signals: [{metric: kv_usage, target: 0.7}]")
        .replace("      - {start: 17:30, end: 20:00, timeZone: Europe/Zurich, maxReplicas: 3}\n", "")
        .replace("kind: kalman", "kind: holt-winters, season: 1d")
    )
    write(text)
    changed, policy = file.changed(), file.policy
    assert policy.budget.max_devices == 10
    assert changed == (
        "budget.maxDevices is 10, was 8",
        "mode is advisory, was enforce",
        "forecaster.kind is holt-winters, was kalman",
        "forecaster.season is 1d, was by default",
        "pools.prefill.startup is 1m30s, was 30s",
        "pools.prefill.schedules.1.daysOfWeek is removed, was Mon, Tue, Wed, Thu, Fri, Sat, Sun",
        "pools.prefill.schedules.1.start is removed, was 17:30",
        "pools.prefill.schedules.1.end is removed, was 20:00",
        "pools.prefill.schedules.1.timeZone is removed, was Europe/Zurich",
        "pools.prefill.schedules.1.minReplicas is removed, was by default",
        "pools.prefill.schedules.1.maxReplicas is removed, was 3",
        "pools.decode.signals.0.target is 0.7, was 0.8",
    )
    assert list(changes(policy, policy)) == []
    assert "pools.prefill.schedules.1.maxReplicas is 3, was not there" in changes(policy, running)


def test_the_actuator_of_a_running_autoscaler_does_not_change(write: Callable[[str], Path]) -> None:
    file = PolicyFile(write(GOOD), lambda _: ())
    running = file.policy
    write(GOOD.replace("kind: ray", "kind: ray, namespace: mine").replace("maxDevices: 8", "maxDevices: 9"))
    with pytest.raises(ConfigError, match=r"actuator.namespace is mine, was pdserve: an actuator changes only with"):
        file.changed()
    write(GOOD.replace("kind: ray", "kind: process"))
    with pytest.raises(ConfigError, match=r"actuator\.kind is process, was ray"):
        file.changed()
    assert file.policy is running


CLOCKS = st.integers(0, 23).map(lambda hour: f"{hour:02}:00")
ZONES = st.sampled_from(["UTC", "Europe/Zurich", "America/New_York", "Australia/Sydney"])
SCHEDULES = st.builds(
    lambda days, clocks, zone, least, most: {
        "daysOfWeek": sorted(days),
        "start": clocks[0],
        "end": clocks[1],
        "timeZone": zone,
        **({"minReplicas": least} if least else {}),
        **({"maxReplicas": most} if most or not least else {}),
    },
    st.sets(st.sampled_from(DAYS), min_size=1, max_size=2),
    st.tuples(CLOCKS, CLOCKS).filter(lambda pair: pair[0] != pair[1]),
    ZONES,
    st.none() | st.integers(1, 3),
    st.integers(3, 5),
)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
WEEKS = [BEGIN + timedelta(weeks=week) for week in (0, 10, 12, 14, 26, 40, 43)]  # clocks change in some
HOURS = [(week + timedelta(hours=hour)).timestamp() for week in WEEKS for hour in range(7 * 24)]


def contradict(schedules: list[Schedule], at_s: float) -> bool:
    held = [each for each in schedules if holds(each, at_s)]
    least = {each.min_replicas for each in held} - {None}
    most = {each.max_replicas for each in held} - {None}
    return len(least) > 1 or len(most) > 1 or max(least or {1}) > min(most or {4})


def of_prefill(schedules: list[dict[str, object]], least: int = 1) -> Policy:
    pool = {"minReplicas": least, "maxReplicas": 4}
    document = {
        "apiVersion": "pdserve/v1alpha1",
        "kind": "AutoscalingPolicy",
        "objectives": {"ttftMs": 500, "tpotMs": 50},
        "budget": {"maxDevices": 100},
        "pools": {"prefill": {**pool, "schedules": schedules}, "decode": pool},
    }
    return Policy.model_validate(document)


def test_schedules_that_contradict_each_other_in_some_weeks_of_the_year_alone_are_refused() -> None:
    zurich = {"start": "08:00", "end": "09:00", "timeZone": "Europe/Zurich", "minReplicas": 2}
    new_york = {"start": "03:00", "end": "04:00", "timeZone": "America/New_York", "minReplicas": 3}
    with pytest.raises(ValidationError, match=r"asks for 3 as minReplicas, and schedules.0 for 2 .* at 07:00 UTC"):
        of_prefill([zurich, new_york])  # in March New York puts its clocks forward three weeks before Zurich does
    of_prefill([zurich, {**new_york, "start": "04:00", "end": "05:00"}])
    of_prefill([zurich, {**new_york, "minReplicas": 2}])


def test_what_holds_after_the_end_of_a_schedule_is_looked_at_too() -> None:
    night = {"daysOfWeek": ["Fri"], "start": "20:00", "end": "06:00", "minReplicas": 1}
    few = {"daysOfWeek": ["Sat"], "start": "00:00", "end": "06:00", "maxReplicas": 2}
    of_prefill([night, few], least=3)
    with pytest.raises(ValidationError, match=r"minReplicas, 3, is above maxReplicas, 2, on Sat at 06:00 UTC"):
        of_prefill([night, {**few, "end": "06:01"}], least=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(SCHEDULES, min_size=1, max_size=3))
def test_schedules_are_refused_if_there_is_an_hour_at_which_they_contradict_each_other(
    given_schedules: list[dict[str, object]],
) -> None:
    schedules = [Schedule.model_validate(each) for each in given_schedules]
    if any(contradict(schedules, at_s) for at_s in HOURS):
        with pytest.raises(ValidationError, match=r"minReplicas|maxReplicas"):
            of_prefill(given_schedules)
    else:
        of_prefill(given_schedules)


NASTY = st.sampled_from(
    [
        "",
        "{",
        "[",
        "&a",
        "*a",
        "<<: ",
        "- ",
        "? ",
        "!!python/none",
        "!!binary ",
        "null",
        "1e999",
        "-1",
        ".nan",
        "\x00",
        "#",
        "::",
    ]
) | st.text(max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 12), NASTY)
def test_whatever_a_file_holds_is_a_policy_or_refused(at: int, length: int, nasty: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "policy.yaml"
        path.write_text(GOOD[:at] + nasty + GOOD[at + length :], encoding="utf-8")
        refused = ""
        try:
            load(path)
        except ConfigError as error:
            refused = str(error)
        assert refused.startswith(str(path)) or not refused
