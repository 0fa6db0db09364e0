"""How fast a pool may change: `behavior` of HPA v2 by its names, with its defaults but for the window of scaleDown."""

from typing import Annotated, Literal

from pydantic import Field

from pdserve.autoscaler.section import DURATION, Section

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
        default=120.0,
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
