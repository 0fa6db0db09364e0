"""What the parts of a policy have to agree on. Pure; each check raises FieldError at the field to change."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pdserve.autoscaler.pools import Pool, Pools
from pdserve.autoscaler.schedules import bounds, changes_of, holds
from pdserve.yaml_models import FieldError

if TYPE_CHECKING:
    from pdserve.autoscaler.schema import Budget, Forecaster, Interval, RoleSwitch

MAX_SEASON_INTERVALS = 20_160  # two weeks of minutes


def check_budget(budget: "Budget", pools: Pools) -> None:
    """Refuse a budget that the pools cannot keep, at any hour of the week."""
    both = (pools.prefill, pools.decode)
    most = sum(pool.devices_per_replica * _greatest(pool) for pool in both)
    if budget.min_devices > budget.max_devices:
        raise FieldError(("budget", "minDevices"), f"{budget.min_devices} is above maxDevices, {budget.max_devices}")
    if budget.min_devices > most:
        raise FieldError(
            ("budget", "minDevices"), f"{budget.min_devices} is above {most}, what both pools hold at their maxReplicas"
        )
    fallback = sum(pool.devices_per_replica * (pool.fallback.replicas or 0) for pool in both)
    if fallback > budget.max_devices:
        raise FieldError(
            ("budget", "maxDevices"),
            f"{budget.max_devices} is below {fallback}, what fallback.replicas of both pools hold",
        )
    for at_s in changes_of((*pools.prefill.schedules, *pools.decode.schedules)):
        least = sum(pool.devices_per_replica * bounds(pool, at_s)[0] for pool in both)
        if least > budget.max_devices:
            raise FieldError(
                ("budget", "maxDevices"),
                f"{budget.max_devices} is below {least}, what minReplicas of both pools hold{_hour(at_s, *both)}",
            )


def check_schedules(name: str, pool: Pool) -> None:
    """Refuse schedules of a pool that ask for different limits at the same time, or for none that can be kept."""
    for at_s in changes_of(pool.schedules):
        held = [(index, each) for index, each in enumerate(pool.schedules) if holds(each, at_s)]
        for field in ("min_replicas", "max_replicas"):
            asking = [(index, getattr(each, field)) for index, each in held if getattr(each, field) is not None]
            for index, count in asking[1:]:
                if count != asking[0][1]:
                    raise FieldError(
                        ("pools", name, "schedules", index),
                        f"asks for {count} as {_KEYS[field]}, and schedules.{asking[0][0]} for {asking[0][1]} at the "
                        f"same time{_hour(at_s, pool)}",
                    )
        least, most = bounds(pool, at_s)
        if least > most:
            place: tuple[int | str, ...] = ("schedules", held[-1][0]) if held else ()
            raise FieldError(
                ("pools", name, *place), f"minReplicas, {least}, is above maxReplicas, {most},{_hour(at_s, pool)}"
            )


_KEYS = {"min_replicas": "minReplicas", "max_replicas": "maxReplicas"}


def check_role_switch(switch: "RoleSwitch", pools: Pools) -> None:
    """Refuse role switches between pools whose replicas hold different numbers of devices."""
    sizes = pools.prefill.devices_per_replica, pools.decode.devices_per_replica
    if switch.enabled and sizes[0] != sizes[1]:
        raise FieldError(
            ("roleSwitch", "enabled"),
            f"must be false where devicesPerReplica of the pools differ, {sizes[0]} and {sizes[1]}",
        )


def check_forecaster(forecaster: "Forecaster", interval: "Interval") -> None:
    """Refuse a season that the kind of forecaster does not have, or that does not fit its interval."""
    season_s, every_s = forecaster.season_s, interval.forecast_s
    if interval.react_s > every_s:
        raise FieldError(("interval", "react"), f"{interval.react_s:g}s is above interval.forecast, {every_s:g}s")
    place = ("forecaster", "season")
    if (forecaster.kind == "holt-winters") != (season_s is not None):
        raise FieldError(place, "is what holt-winters needs, and no other kind")
    if season_s is None:
        return
    if not 2 <= season_s / every_s <= MAX_SEASON_INTERVALS:
        raise FieldError(
            place,
            f"{season_s:g}s is {season_s / every_s:g} times interval.forecast, {every_s:g}s; "
            f"it must be 2 to {MAX_SEASON_INTERVALS} times as long",
        )


def _greatest(pool: Pool) -> int:
    return max(pool.max_replicas, *(each.max_replicas or 0 for each in pool.schedules), 0)


def _hour(at_s: float, *pools: Pool) -> str:
    """Return which hour it is that limits are compared at, or nothing where they are the same at all hours."""
    return f" on {datetime.fromtimestamp(at_s, UTC):%a at %H:%M} UTC" if any(pool.schedules for pool in pools) else ""
