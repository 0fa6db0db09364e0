"""A policy file says what it means: its limits at each hour, and its defaults."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from pdserve.autoscaler.pools import Bounds, bounds
from pdserve.autoscaler.schema import Policy


def policy_of(**prefill: object) -> Policy:
    """Return a small policy whose prefill pool has these keys."""
    return Policy.model_validate(
        {
            "apiVersion": "pdserve/v1alpha1",
            "kind": "AutoscalingPolicy",
            "objectives": {"ttftMs": 500, "tpotMs": 50},
            "budget": {"maxDevices": 8},
            "pools": {"prefill": {"maxReplicas": 4, **prefill}, "decode": {"maxReplicas": 4}},
        },
        by_name=False,
    )


@pytest.mark.parametrize(
    ("given", "seconds"), [(90, 90.0), ("90s", 90.0), ("1.5m", 90.0), ("1h30m", 5400.0), ("500ms", 0.5), ("1d", 86_400)]
)
def test_durations_are_seconds_or_texts_with_units(given: object, seconds: float) -> None:
    assert policy_of(startup=given).pools.prefill.startup_s == seconds


@pytest.mark.parametrize("given", ["90", "-5s", -5, "5 s", "", "1w", "s", float("inf"), float("nan"), True, None])
def test_other_durations_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="startup"):
        policy_of(startup=given)


def test_what_is_not_given_of_a_behavior_is_as_in_hpa() -> None:
    behavior = policy_of(behavior={"scaleDown": {"selectPolicy": "Min"}}).pools.prefill.behavior
    assert behavior.scale_up.stabilization_window_seconds == 0
    assert behavior.scale_down.stabilization_window_seconds == 300
    assert [(each.type, each.value, each.period_seconds) for each in behavior.scale_up.policies] == [
        ("Pods", 4, 15),
        ("Percent", 100, 15),
    ]
    assert [(each.type, each.value, each.period_seconds) for each in behavior.scale_down.policies] == [
        ("Percent", 100, 15)
    ]
    assert (behavior.scale_up.select_policy, behavior.scale_down.select_policy) == ("Max", "Min")
    assert behavior.scale_up.tolerance == behavior.scale_down.tolerance == 0.1


NIGHT = {"daysOfWeek": ["Fri"], "start": "22:00", "end": "06:00", "timeZone": "Europe/Zurich", "minReplicas": 3}


@pytest.mark.parametrize(
    ("moment", "least"),
    [
        ("2026-11-20 21:59", 1),
        ("2026-11-20 22:00", 3),  # a Friday
        ("2026-11-21 05:59", 3),
        ("2026-11-21 06:00", 1),
        ("2026-11-21 23:00", 1),
        ("2026-11-20 05:00", 1),
    ],
)
def test_a_schedule_past_midnight_belongs_to_the_day_that_it_starts_on(moment: str, least: int) -> None:
    local = datetime.fromisoformat(moment).replace(tzinfo=ZoneInfo("Europe/Zurich"))
    assert bounds(policy_of(schedules=[NIGHT]).pools.prefill, local.timestamp()) == Bounds(least, 4)
    assert bounds(policy_of(schedules=[NIGHT]).pools.decode, local.timestamp()) == Bounds(1, 4)
