"""Limits of a pool at a moment, under the schedules of its policy. Pure."""

from datetime import datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from pdserve.autoscaler.schema import DAYS, Policy, Pool, Schedule
from pdserve.roles import Role


def bounds(policy: Policy, role: Role, unix_s: float) -> tuple[int, int]:
    """Return how many replicas a pool has at least and at most at a moment of the wall clock, Unix seconds."""
    return bounds_of(policy.pools.of(role), unix_s)


def bounds_of(pool: Pool, unix_s: float) -> tuple[int, int]:
    """Return the limits of one pool. Where schedules differ, which no valid policy allows, the greatest ones hold."""
    held = [each for each in pool.schedules if holds(each, unix_s)]
    least = [each.min_replicas for each in held if each.min_replicas is not None]
    most = [each.max_replicas for each in held if each.max_replicas is not None]
    return max(least, default=pool.min_replicas), max(most, default=pool.max_replicas)


def holds(schedule: Schedule, unix_s: float) -> bool:
    """Whether a schedule holds at a moment. It goes by the clock on the wall, also when that is put forward or back."""
    zone: tzinfo = ZoneInfo(schedule.time_zone)
    local = datetime.fromtimestamp(unix_s, zone)
    now, start, end = f"{local:%H:%M}", schedule.start, schedule.end
    if start < end:
        return start <= now < end and _day(local) in schedule.days_of_week
    yesterday = local - timedelta(days=1)
    return (now >= start and _day(local) in schedule.days_of_week) or (
        now < end and _day(yesterday) in schedule.days_of_week
    )


def _day(local: datetime) -> str:
    return DAYS[local.weekday()]
