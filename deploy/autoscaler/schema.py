"""The policy file: what a capacity owner wants of each pool. `loading.load` reads one."""

from typing import Annotated, Literal

from pydantic import Field

from pdserve.autoscaler.actuators import Actuator, ProcessActuator
from pdserve.autoscaler.behavior import Behavior
from pdserve.autoscaler.section import DURATION, Section
from pdserve.roles import Role

MAX_REPLICAS = 4096  # of a pool

Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: tuple[Day, ...] = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
Metric = Literal["queue_tokens", "kv_usage", "running_sequences", "held_requests"]

Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Devices = Annotated[int, Field(ge=1, le=65_536)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]


class Objectives(Section):
    """What requests are to get."""

    ttft_ms: Milliseconds = Field(description="Time to first token, milliseconds, that a request should not exceed.")
    tpot_ms: Milliseconds = Field(
        description="Time per output token after the first, milliseconds, that a request should not exceed on average."
    )
    attainment: float = Field(
        default=0.95,
        ge=0.5,
        le=0.9999,
        description="Share of all requests that should be within both, refused ones counted.",
    )

    @property
    def ttft_s(self) -> float:
        return self.ttft_ms / 1000

    @property
    def tpot_s(self) -> float:
        return self.tpot_ms / 1000


class Budget(Section):
    """Devices that both pools share."""

    max_devices: Devices = Field(
        description="Devices that both pools may hold together, starting and draining ones too."
    )
    min_devices: int = Field(default=0, ge=0, le=65_536, description="Devices that both pools hold together at least.")


class Interval(Section):
    """How often the autoscaler decides."""

    forecast_s: Annotated[float, Field(gt=0, le=86_400, strict=True), DURATION] = Field(
        default=60.0, description="Period of the slow loop, which sizes each pool for the demand that is forecast."
    )
    react_s: Annotated[float, Field(ge=0.1, le=3600, strict=True), DURATION] = Field(
        default=5.0,
        description="Period of the fast loop, which observes, and adds replicas when what waits would be late.",
    )


class Forecaster(Section):
    """How demand is forecast."""

    kind: Literal["last", "holt-winters", "kalman"] = Field(
        default="kalman",
        description="last: demand stays as it is. holt-winters: level and trend, and what recurs each season. "
        "kalman: level and trend, weighed by how noisy demand is.",
    )
    horizon_s: Annotated[float, Field(gt=0, le=86_400, strict=True), DURATION] | None = Field(
        default=None,
        description="How far ahead demand is forecast. By default a pool's start-up time and a forecast interval.",
    )
    season_s: Annotated[float, Field(gt=0, le=31 * 86_400, strict=True), DURATION] | None = Field(
        default=None, description="Period after which demand recurs, such as 1d or 7d; holt-winters needs it."
    )
    quantile: float = Field(
        default=0.9, ge=0.5, lt=1.0, description="Quantile of the forecast that a pool is sized for: how sure to be."
    )
    warmup_trace: str | None = Field(
        default=None,
        description="A trace of requests to learn from before the first forecast, as `pdserve sim` takes them.",
    )


class Signal(Section):
    """A load per replica that a pool should not exceed."""

    metric: Metric = Field(
        description="queue_tokens: prompt tokens that wait at a replica. kv_usage: share of its KV tokens in use. "
        "running_sequences: sequences that it runs. held_requests: requests that wait in routers, for each replica."
    )
    target: float = Field(
        gt=0, le=1e12, allow_inf_nan=False, description="Mean over the pool's replicas above which the pool grows."
    )


class Schedule(Section):
    """Limits that hold at certain hours, in place of the pool's own."""

    days_of_week: tuple[Day, ...] = Field(
        default=DAYS, min_length=1, description="Days on which it starts; by default all."
    )
    start: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$", description="Time of day at which it starts, HH:MM.")
    end: str = Field(
        pattern=r"^([01]\d|2[0-3]):[0-5]\d$|^24:00$",
        description="Time of day at which it ends, HH:MM up to 24:00; of the day after if it is before the start.",
    )
    time_zone: str = Field(
        default="UTC", description="Time zone of both, from the IANA database, such as Europe/Zurich."
    )
    min_replicas: Replicas | None = Field(default=None, description="In place of the pool's minReplicas.")
    max_replicas: Replicas | None = Field(default=None, description="In place of the pool's maxReplicas.")


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

    min_replicas: Replicas = Field(default=1, description="Replicas that the pool has at least.")
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
        max_length=64,
        description="Limits that hold at certain hours in place of minReplicas and maxReplicas.",
    )
    fallback: Fallback = Field(default=Fallback(), description="What the pool does without fresh metrics.")


class Pools(Section):
    """Both pools."""

    prefill: Pool = Field(description="Workers that compute prompts.")
    decode: Pool = Field(description="Workers that decode.")

    def of(self, role: Role) -> Pool:
        """Return the pool of a role that is not mixed."""
        if role is Role.MIXED:
            raise ValueError("mixed workers have no pool of their own")
        return self.prefill if role is Role.PREFILL else self.decode


class RoleSwitch(Section):
    """Whether workers change pools while they serve."""

    enabled: bool = Field(
        default=True,
        description="Whether a worker may change its role where that is faster, or where the budget is spent.",
    )
    min_dwell_s: Annotated[float, Field(ge=0, le=86_400, strict=True), DURATION] = Field(
        default=60.0, description="Time for which a worker keeps a role before it may change again."
    )


class Policy(Section):
    """How many replicas each pool is to have, and when."""

    api_version: Literal["pdserve/v1alpha1"] = Field(description="Version of this format.")
    kind: Literal["AutoscalingPolicy"] = Field(description="What this file is.")
    objectives: Objectives = Field(description="What requests are to get.")
    budget: Budget = Field(description="Devices that both pools share.")
    mode: Literal["enforce", "advisory"] = Field(
        default="enforce",
        description="enforce: decisions are carried out. advisory: they are only logged and published.",
    )
    interval: Interval = Field(default=Interval(), description="How often the autoscaler decides.")
    forecaster: Forecaster = Field(default=Forecaster(), description="How demand is forecast.")
    pools: Pools = Field(description="Each pool's limits.")
    role_switch: RoleSwitch = Field(default=RoleSwitch(), description="Whether workers change pools while they serve.")
    actuator: Actuator = Field(
        default=ProcessActuator(), description="What starts and ends replicas.", discriminator="kind"
    )
