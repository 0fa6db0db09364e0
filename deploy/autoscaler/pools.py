"""What a policy says of one pool: its limits at each hour, and how it changes within them.

`behavior` is that of HPA v2 by its names, with its defaults but for the window of scaleDown.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, field_validator, model_validator

from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.base.yaml_models import DURATION, FieldError, Section, did_you_mean

MAX_REPLICAS = 4096  # of a pool

Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
Metric = Literal["queue_tokens", "kv_usage", "running_sequences", "held_requests"]

Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS, strict=True)]
LeastReplicas = Annotated[int, Field(ge=0, le=MAX_REPLICAS, strict=True)]
Devices = Annotated[int, Field(ge=1, le=65_536, strict=True)]


Window = Annotated[float, Field(ge=0, le=3600, strict=True), DURATION]
Tolerance = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]


class RateLimit(Section):
    """How much a pool may change within a period."""

    type: Literal["Pods", "Percent"] = Field(
        description="Pods: `value` counts replicas. Percent: it is a share of the pool at the period's start."
    )
    value: int = Field(
        ge=1, le=10_000, strict=True, description="Replicas, or percent, that the pool may change by in a period."
    )
    period_seconds: Annotated[float, Field(gt=0, le=1800, strict=True), DURATION] = Field(
        description="Length of the period."
    )


RateLimits = Annotated[tuple[RateLimit, ...], Field(min_length=1, max_length=16)]


class ScalingRules(Section):
    """Limits of one direction."""

    stabilization_window_seconds: Window
    select_policy: Literal["Max", "Min", "Disabled"] = Field(
        default="Max",
        description="Which of the policies counts: the one that allows the greatest change, or the least. Disabled: no "
        "change in this direction.",
    )
    policies: RateLimits
    tolerance: Tolerance


class ScaleUp(ScalingRules):
    """Limits of growth."""

    stabilization_window_seconds: Window = Field(
        default=0.0,
        description="Time over which wanted sizes are looked at together: a pool grows only to the least of them.",
    )
    policies: RateLimits = Field(
        default=(
            RateLimit(type="Pods", value=4, period_seconds=15.0),
            RateLimit(type="Percent", value=100, period_seconds=15.0),
        ),
        description="Limits on the growth in a period.",
    )
    tolerance: Tolerance = Field(
        default=0.1, description="Share by which demand may exceed what the pool is sized for before the pool grows."
    )


class ScaleDown(ScalingRules):
    """Limits of shrinking."""

    stabilization_window_seconds: Window = Field(
        default=300.0,
        description="Time over which wanted sizes are looked at together: a pool shrinks only to the greatest of them.",
    )
    policies: RateLimits = Field(
        default=(RateLimit(type="Percent", value=100, period_seconds=15.0),),
        description="Limits on the shrinking in a period.",
    )
    tolerance: Tolerance = Field(
        default=0.1,
        description="Margin: a pool shrinks only if what is left would meet the objectives with this much more demand.",
    )


class Behavior(Section):
    """How fast a pool may grow and shrink."""

    scale_up: ScaleUp = Field(default=ScaleUp(), description="Limits of growth.")
    scale_down: ScaleDown = Field(default=ScaleDown(), description="Limits of shrinking.")


class Signal(Section):
    """A load per replica that a pool should not exceed."""

    metric: Metric = Field(
        description="queue_tokens: prompt tokens that wait at a replica. kv_usage: share of its KV tokens in use. "
        "running_sequences: sequences that it runs. held_requests: requests that wait in routers, for each replica."
    )
    target: float = Field(
        gt=0, le=1e12, allow_inf_nan=False, description="Mean over the pool's replicas above which the pool grows."
    )

    @model_validator(mode="after")
    def _be_possible(self) -> Self:
        if self.metric == "kv_usage" and self.target > 1:
            raise FieldError(("target",), f"{self.target:g} is above 1, the greatest kv_usage")
        return self


class Schedule(Section):
    """Limits that hold at certain hours, in place of the pool's own."""

    days_of_week: tuple[Day, ...] = Field(
        default=DAYS, min_length=1, description="Days on which it starts; by default all."
    )
    start: str = Field(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$", description="Time of day at which it starts, HH:MM.")
    end: str = Field(
        pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$|^24:00$",
        description="Time of day at which it ends, HH:MM up to 24:00; of the day after if it is before the start.",
    )
    time_zone: str = Field(
        default="UTC", description="Time zone of both, from the IANA database, such as Europe/Zurich."
    )
    min_replicas: LeastReplicas | None = Field(default=None, description="In place of the pool's minReplicas.")
    max_replicas: Replicas | None = Field(default=None, description="In place of the pool's maxReplicas.")

    @field_validator("time_zone")
    @classmethod
    def _be_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"is no time zone{did_you_mean(name, available_timezones())}") from error
        return name

    @model_validator(mode="after")
    def _do_something(self) -> Self:
        if self.min_replicas is None and self.max_replicas is None:
            raise ValueError("sets neither minReplicas nor maxReplicas")
        if self.start == self.end:
            raise FieldError(("end",), f"{self.end} is the start as well; the whole day is 00:00 to 24:00")
        return self


class Fallback(Section):
    """What a pool does without fresh metrics. It never shrinks then."""

    failure_threshold: int = Field(
        default=3,
        ge=1,
        le=10_000,
        description="Reactions in a row without fresh metrics after which the fallback counts.",
    )
    replicas: Replicas | None = Field(
        default=None, description="Size that the pool then grows to if it is smaller; by default it stays as it is."
    )


class Pool(Section):
    """One pool: all workers of a role."""

    min_replicas: LeastReplicas = Field(
        default=1,
        description="Replicas that the pool has at least. 0: it has none while no request comes; the router's "
        "scale_to_zero then lets the first ones wait.",
    )
    max_replicas: Replicas = Field(description="Replicas that the pool has at most.")
    startup_s: Annotated[float, Field(ge=0, le=86_400, strict=True), DURATION] = Field(
        default=60.0,
        description="First guess of the time from an order to a replica that serves; what is measured replaces it.",
    )
    drain_timeout_s: Annotated[float, Field(gt=0, le=86_400, strict=True), DURATION] = Field(
        default=120.0, description="Time after which a drain that has not ended is reported as late."
    )
    devices_per_replica: Devices = Field(default=1, description="Devices that one replica holds.")
    cost_per_replica_hour: float = Field(
        default=0.0, ge=0, le=1e9, allow_inf_nan=False, description="What a replica costs for an hour, in any currency."
    )
    signals: tuple[Signal, ...] = Field(
        default=(),
        max_length=16,
        description="Loads that the pool should not exceed, whatever is predicted; none by default.",
    )
    behavior: Behavior = Field(default=Behavior(), description="How fast the pool may grow and shrink.")
    schedules: tuple[Schedule, ...] = Field(
        default=(),
        max_length=16,
        description="Limits that hold at certain hours in place of minReplicas and maxReplicas.",
    )
    fallback: Fallback = Field(default=Fallback(), description="What the pool does without fresh metrics.")

    @property
    def may_be_empty(self) -> bool:
        """Whether the pool may have no replicas at some hour."""
        return 0 in (self.min_replicas, *(each.min_replicas for each in self.schedules))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        least, most, fallback = self.min_replicas, self.max_replicas, self.fallback.replicas
        if least > most:
            raise FieldError(("minReplicas",), f"{least} is above maxReplicas, {most}")
        if fallback is not None and not least <= fallback <= most:
            raise FieldError(
                ("fallback", "replicas"), f"{fallback} is not between minReplicas, {least}, and maxReplicas, {most}"
            )
        metrics = [each.metric for each in self.signals]
        for index, metric in enumerate(metrics):
            if metric in metrics[:index]:
                raise FieldError(("signals", index, "metric"), f"{metric} is there twice")
        return self


class Pools(Section):
    """Both pools."""

    prefill: Pool = Field(description="Workers that compute prompts.")
    decode: Pool = Field(description="Workers that decode.")

    def of(self, role: Role) -> Pool:
        """Return the pool of a role. What the decode pool says of a replica holds for a mixed one."""
        return self.prefill if role is Role.PREFILL else self.decode


@value
class Bounds:
    """How many replicas a pool may have, and what each takes."""

    least: int
    most: int
    devices: int = 1

    def within(self, size: int) -> int:
        """Return the size, or the limit beyond which it is."""
        return max(self.least, min(self.most, size))


_FIRST_MONDAY = datetime(2026, 1, 5, tzinfo=UTC)  # of the year whose weeks stand for all
_WEEK = timedelta(days=7)


def bounds(pool: Pool, unix_s: float) -> Bounds:
    """Return the limits of a pool at a moment of the wall clock, Unix seconds.

    Where schedules differ, which no valid policy allows, the greatest limits hold.
    """
    held = [each for each in pool.schedules if holds(each, unix_s)]
    least = [each.min_replicas for each in held if each.min_replicas is not None]
    most = [each.max_replicas for each in held if each.max_replicas is not None]
    return Bounds(max(least, default=pool.min_replicas), max(most, default=pool.max_replicas), pool.devices_per_replica)


def holds(schedule: Schedule, unix_s: float) -> bool:
    """Return whether a schedule holds at a moment. It goes by its time zone's clock, put forward or back."""
    local = datetime.fromtimestamp(unix_s, ZoneInfo(schedule.time_zone))
    now, start, end = f"{local:%H:%M}", schedule.start, schedule.end
    today = DAYS[local.weekday()] in schedule.days_of_week
    if start < end:
        return today and start <= now < end
    yesterday = DAYS[local.weekday() - 1] in schedule.days_of_week
    return (today and now >= start) or (yesterday and now < end)


def changes_of(schedules: Sequence[Schedule]) -> list[float]:
    """Return moments, Unix seconds, among which each combination of schedules holds that ever holds; never none.

    These are the starts and ends in one week for each combination of UTC offsets that the time zones have in a year.
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
