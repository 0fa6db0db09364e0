"""The policy file: what a capacity owner wants of each pool, and what its parts have to agree on. Pure.

Each check raises FieldError at the field to change.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.json_schema import GenerateJsonSchema

from pdserve.autoscaler.pools import Devices, Pool, Pools, bounds, changes_of, holds
from pdserve.base.yaml_models import DURATION, FieldError, Section, key_of, read_model

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
        description="Period of the fast loop, which observes, and adds replicas where more comes than was forecast, or "
        "requests are refused.",
    )


ForecasterKind = Literal["last", "holt-winters", "kalman"]


class Forecaster(Section):
    """How demand is forecast."""

    kind: ForecasterKind = Field(
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


Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
Amount = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]


class _Ordering(Section):
    """What takes orders."""

    timeout_s: Annotated[float, Field(gt=0, le=3600, strict=True), DURATION] = Field(
        default=10.0,
        description="Time in which an order is to be taken on; later it counts as failed, and is given again.",
    )


class ProcessActuator(_Ordering):
    """Processes on this machine, kept by `pdserve up`."""

    kind: Literal["process"] = Field(default="process", description="Processes on this machine, kept by `pdserve up`.")


class RayActuator(_Ordering):
    """Ray: an actor for each worker, which owns the worker's process."""

    kind: Literal["ray"] = Field(
        default="ray", description="Actors of a Ray cluster, each of which owns a worker's process."
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Address of the Ray cluster; by default Ray looks for it.",
    )
    namespace: Name = Field(
        default="pdserve", description="Ray namespace of the actors, one for each cluster of pdserve."
    )
    resources_per_device: dict[Name, Amount] = Field(
        {"GPU": 1.0},
        min_length=1,
        max_length=16,
        description="Ray resources that a device of a replica takes, by name: GPU, CPU or a custom one. A replica of "
        "several devices gets them on one node.",
    )
    request_nodes: bool = Field(
        default=True, description="Whether Ray's autoscaler is asked for nodes ahead of the actors."
    )


class ScaleTarget(Section):
    """A Deployment of Kubernetes whose scale is set; of no other workload can the pod be chosen that is removed."""

    name: Name = Field(description="Its name.")


class KubernetesActuator(_Ordering):
    """Kubernetes: the scale subresource of one workload for each pool."""

    kind: Literal["kubernetes"] = Field(
        default="kubernetes", description="Pods of two deployments of Kubernetes, whose scale is set."
    )
    namespace: Name = Field(default="default", description="Namespace of both workloads.")
    prefill: ScaleTarget = Field(description="Deployment of the prefill pool.")
    decode: ScaleTarget = Field(description="Deployment of the decode pool.")
    lease: Name = Field(
        default="pdserve-autoscaler",
        description="Name of the Lease whose holder decides, where several autoscalers run.",
    )


class PublishActuator(Section):
    """Nothing is started or ended: the wanted sizes are published for HPA or KEDA to act on."""

    kind: Literal["publish"] = Field(
        default="publish", description="Nobody: `pdserve_desired_replicas` on /metrics is for HPA or KEDA to act on."
    )


Actuator = ProcessActuator | RayActuator | KubernetesActuator | PublishActuator


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


def load(path: Path) -> Policy:
    """Read a policy; ConfigError names file, line, field and limit of whatever is wrong."""
    return read_model(Policy, path)


def json_schema() -> str:
    """Return the JSON Schema of policy files, as it is kept beside the examples."""
    described = Policy.model_json_schema(schema_generator=Untitled)
    return json.dumps({"$schema": Untitled.schema_dialect, **described}, indent=2) + "\n"


class Untitled(GenerateJsonSchema):
    """Leaves out titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


MAX_SEASON_INTERVALS = 20_160  # two weeks of minutes


def check_budget(budget: Budget, pools: Pools) -> None:
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
        least = sum(pool.devices_per_replica * max(1, bounds(pool, at_s).least) for pool in both)
        if least > budget.max_devices:
            raise FieldError(
                ("budget", "maxDevices"),
                f"{budget.max_devices} is below {least}, what both pools need at least{_hour(at_s, *both)}",
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
                        f"asks for {count} as {key_of(field)}, and schedules.{asking[0][0]} for {asking[0][1]} at the "
                        f"same time{_hour(at_s, pool)}",
                    )
        limits = bounds(pool, at_s)
        if limits.least > limits.most:
            place: tuple[int | str, ...] = ("schedules", held[-1][0]) if held else ()
            problem = f"minReplicas, {limits.least}, is above maxReplicas, {limits.most},{_hour(at_s, pool)}"
            raise FieldError(("pools", name, *place), problem)


def check_role_switch(switch: RoleSwitch, pools: Pools) -> None:
    """Refuse role switches between pools whose replicas hold different numbers of devices."""
    sizes = pools.prefill.devices_per_replica, pools.decode.devices_per_replica
    if switch.enabled and sizes[0] != sizes[1]:
        raise FieldError(
            ("roleSwitch", "enabled"),
            f"must be false where devicesPerReplica of the pools differ, {sizes[0]} and {sizes[1]}",
        )


def check_forecaster(forecaster: Forecaster, interval: Interval) -> None:
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
