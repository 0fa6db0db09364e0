"""Limits of a pool at a moment, under the schedules of its policy. Pure."""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from pdserve.autoscaler.pools import DAYS, Pool, Schedule

_FIRST_MONDAY = datetime(2026, 1, 5, tzinfo=UTC)  # of the year whose weeks stand for all
_WEEK = timedelta(days=7)


def bounds(pool: Pool, unix_s: float) -> tuple[int, int]:
    """Return how many replicas a pool has at least and at most at a moment of the wall clock, Unix seconds.

    Where schedules differ, which no valid policy allows, the greatest limits hold.
    """
    held = [each for each in pool.schedules if holds(each, unix_s)]
    least = [each.min_replicas for each in held if each.min_replicas is not None]
    most = [each.max_replicas for each in held if each.max_replicas is not None]
    return max(least, default=pool.min_replicas), max(most, default=pool.max_replicas)


def holds(schedule: Schedule, unix_s: float) -> bool:
    """Whether a schedule holds at a moment. It goes by the clock on the wall, also when that is put forward or back."""
    local = datetime.fromtimestamp(unix_s, ZoneInfo(schedule.time_zone))
    now, start, end = f"{local:%H:%M}", schedule.start, schedule.end
    today = DAYS[local.weekday()] in schedule.days_of_week
    if start < end:
        return today and start <= now < end
    yesterday = DAYS[local.weekday() - 1] in schedule.days_of_week
    return (today and now >= start) or (yesterday and now < end)


def changes_of(schedules: Sequence[Schedule]) -> list[float]:
    """Return moments, Unix seconds, such that whatever schedules do together they do at one of them; never none.

    These are their starts and ends in one week for each way in which their time zones stand to each other in a year.
    """
    zones = sorted({each.time_zone for each in schedules})
    weeks = {_offsets(zones, week): week for week in (_FIRST_MONDAY + count * _WEEK for count in range(53))}
    found = {moment for each in schedules for week in weeks.values() for moment in _changes(each, week.date())}
    return sorted(found) or [_FIRST_MONDAY.timestamp()]


def _offsets(zones: Sequence[str], week: datetime) -> tuple[timedelta | None, ...]:
    return tuple(
        (week + days).astimezone(ZoneInfo(zone)).utcoffset() for days in (timedelta(), _WEEK) for zone in zones
    )


def _changes(schedule: Schedule, monday: date) -> Iterator[float]:
    for day in schedule.days_of_week:
        began = monday + timedelta(days=DAYS.index(day))
        yield _moment(schedule, began, schedule.start)
        yield _moment(schedule, began + timedelta(days=schedule.end < schedule.start), schedule.end)


def _moment(schedule: Schedule, day: date, clock: str) -> float:
    hours, minutes = map(int, clock.split(":"))
    after = timedelta(days=hours // 24)
    local = datetime.combine(day + after, time(hours % 24, minutes), ZoneInfo(schedule.time_zone))
    return local.timestamp()
