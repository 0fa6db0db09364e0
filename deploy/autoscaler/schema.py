"""The policy file: what a capacity owner wants of each pool. `loading.load` reads one."""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.json_schema import GenerateJsonSchema

from pdserve.autoscaler.actuators import Actuator, ProcessActuator
from pdserve.autoscaler.checks import check_budget, check_forecaster, check_role_switch, check_schedules
from pdserve.autoscaler.pools import Devices, Pools
from pdserve.autoscaler.section import DURATION, Section

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
    min_devices: int = Field(
        default=0, ge=0, le=65_536, strict=True, description="Devices that both pools hold together at least."
    )


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
        default=0.6, ge=0.5, lt=1.0, description="Quantile of the forecast that a pool is sized for: how sure to be."
    )
    warmup_trace: str | None = Field(
        default=None,
        description="A trace of requests, as `pdserve sim` takes them, to learn from before the first forecast. It "
        "counts as what came up to the start.",
    )


class RoleSwitch(Section):
    """Whether workers change pools while they serve."""

    enabled: bool = Field(
        default=True,
        description="Whether a worker may change its role where that is faster, or where the budget is spent. "
        "Both pools then have the same devicesPerReplica.",
    )
    min_dwell_s: Annotated[float, Field(ge=0, le=86_400, strict=True), DURATION] = Field(
        default=60.0,
        description="Time for which a worker keeps a role before it may change again. A pool does not undo a change "
        "for as long either; a replica that was added is kept for so long after its start-up.",
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

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_schedules("prefill", self.pools.prefill)
        check_schedules("decode", self.pools.decode)
        check_budget(self.budget, self.pools)
        check_role_switch(self.role_switch, self.pools)
        check_forecaster(self.forecaster, self.interval)
        return self


def json_schema() -> str:
    """Return the JSON Schema of policy files, as it is kept beside the examples."""
    described = Policy.model_json_schema(schema_generator=_Untitled)
    return json.dumps({"$schema": _Untitled.schema_dialect, **described}, indent=2) + "\n"


class _Untitled(GenerateJsonSchema):
    """Leaves out titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False
