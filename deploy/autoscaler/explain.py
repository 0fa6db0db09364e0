"""A policy in plain sentences, and what another one changes. Pure."""

from collections.abc import Iterator

from pydantic import BaseModel

from pdserve.autoscaler.pools import DAYS, Fallback, Pool, RateLimit, ScalingRules, Schedule, Signal
from pdserve.autoscaler.schema import (
    Actuator,
    Forecaster,
    KubernetesActuator,
    Policy,
    ProcessActuator,
    PublishActuator,
    RayActuator,
    RoleSwitch,
)
from pdserve.base.yaml_models import in_units, key_of

_SIGNALS = {
    "queue_tokens": "{:g} prompt tokens wait at a replica on average",
    "kv_usage": "{:.0%} of its KV tokens are in use",
    "running_sequences": "a replica runs {:g} sequences on average",
    "held_requests": "{:g} requests for each replica wait in routers",
}


def sentences(policy: Policy) -> Iterator[str]:
    """Say what a policy makes an autoscaler do, and when; what belongs to a pool is indented."""
    wanted, budget, interval = policy.objectives, policy.budget, policy.interval
    yield (
        f"Requests should get their first token within {wanted.ttft_ms:g} ms, and later ones within {wanted.tpot_ms:g} "
        f"ms each on average. {wanted.attainment * 100:g}% of all requests should get both."
    )
    least = f", and at least {budget.min_devices}" if budget.min_devices else ""
    yield f"Both pools together hold at most {_count(budget.max_devices, 'device')}{least}."
    yield f"Every {in_units(interval.forecast_s)} each pool is sized for {_forecast(policy.forecaster)}."
    often = in_units(interval.react_s)
    yield f"Every {often} replicas are added if more comes than was forecast, or requests are refused."
    for name, pool in (("prefill", policy.pools.prefill), ("decode", policy.pools.decode)):
        yield f"The {name} pool:"
        yield from (f"  {sentence}" for sentence in _pool(pool, interval.react_s))
    yield _switching(policy.role_switch)
    dwell = in_units(policy.role_switch.min_dwell_s)
    yield f"A pool does not undo a change for {dwell}; a replica that was added is kept for so long after its start-up."
    yield _acting(policy.actuator, advisory=policy.mode == "advisory")


def _forecast(forecaster: Forecaster) -> str:
    ahead = f"{in_units(forecaster.horizon_s)} ahead" if forecaster.horizon_s else "as far ahead as its start-up takes"
    learnt = f", learnt from {forecaster.warmup_trace} at first" if forecaster.warmup_trace else ""
    season = f" with a season of {in_units(forecaster.season_s)}" if forecaster.season_s else ""
    return f"quantile {forecaster.quantile:g} of the demand {ahead} ({forecaster.kind}{season}{learnt})"


def _pool(pool: Pool, react_s: float) -> Iterator[str]:
    each = _count(pool.devices_per_replica, "device")
    yield f"It has {pool.min_replicas} to {_count(pool.max_replicas, 'replica')} of {each}."
    yield from map(_schedule, pool.schedules)
    if pool.may_be_empty:
        yield _empty(pool)
    startup, drain = in_units(pool.startup_s), in_units(pool.drain_timeout_s)
    yield f"A replica is expected to serve {startup} after its order, until start-ups are measured."
    yield f"A drain that has not ended after {drain} is reported as late."
    yield from map(_signal, pool.signals)
    yield _growing(pool.behavior.scale_up)
    yield _shrinking(pool.behavior.scale_down)
    yield _without_metrics(pool.fallback, react_s)
    if pool.cost_per_replica_hour:
        cost = pool.cost_per_replica_hour
        yield f"It costs {cost * pool.min_replicas:g} to {cost * pool.max_replicas:g} an hour, {cost:g} a replica."


def _empty(pool: Pool) -> str:
    quiet = in_units(pool.behavior.scale_down.stabilization_window_seconds)
    startup, cost = in_units(pool.startup_s), pool.cost_per_replica_hour
    saved = f" An hour without any saves {cost:g}." if cost else ""
    return (
        f"It has none once no request has come or run for {quiet}. The first request then waits until one serves, "
        f"which takes {startup} until start-ups are measured.{saved}"
    )


def _schedule(schedule: Schedule) -> str:
    days = "every day" if set(schedule.days_of_week) == set(DAYS) else f"on {', '.join(schedule.days_of_week)}"
    limits = [
        f"at {word} {count}"
        for word, count in (("least", schedule.min_replicas), ("most", schedule.max_replicas))
        if count is not None
    ]
    later = " the day after" if schedule.end < schedule.start else ""
    return f"From {schedule.start} to {schedule.end}{later}, {days} ({schedule.time_zone}): {' and '.join(limits)}."


def _signal(signal: Signal) -> str:
    return f"It grows, whatever is predicted, if more than {_SIGNALS[signal.metric].format(signal.target)}."


def _growing(rules: ScalingRules) -> str:
    if rules.select_policy == "Disabled":
        return "It never grows by itself."
    window = in_units(rules.stabilization_window_seconds)
    waits = f", and only as far as was wanted for {window}" if rules.stabilization_window_seconds else ""
    over = f"more than {rules.tolerance:.0%} above what it is sized for"
    return f"It grows if demand is {over}{waits}, by {_rates(rules)}."


def _shrinking(rules: ScalingRules) -> str:
    if rules.select_policy == "Disabled":
        return "It never shrinks by itself."
    window = in_units(rules.stabilization_window_seconds)
    waits = f" for all of {window}" if rules.stabilization_window_seconds else ""
    margin = f"with {rules.tolerance:.0%} more demand"
    return f"It shrinks if fewer replicas would have done{waits}, {margin}, by {_rates(rules)}."


def _rates(rules: ScalingRules) -> str:
    limits = [f"{_change(each)} in {in_units(each.period_seconds)}" for each in rules.policies]
    which = "" if len(limits) == 1 else f", whichever is {'more' if rules.select_policy == 'Max' else 'less'}"
    return f"at most {' or '.join(limits)}{which}"


def _change(limit: RateLimit) -> str:
    return f"{limit.value}%" if limit.type == "Percent" else _count(limit.value, "replica")


def _without_metrics(fallback: Fallback, react_s: float) -> str:
    if fallback.replicas is None:
        return "Without fresh metrics it keeps its size."
    after = in_units(react_s * fallback.failure_threshold)
    return f"Without fresh metrics it keeps its size, and after {after} grows to {fallback.replicas} if it is smaller."


def _switching(switch: RoleSwitch) -> str:
    if not switch.enabled:
        return "Workers keep their roles."
    return (
        "A worker changes its role where that is faster than to start one or where the budget is spent, "
        f"{in_units(switch.min_dwell_s)} after its last change at the earliest."
    )


def _acting(actuator: Actuator, *, advisory: bool) -> str:
    if advisory:
        return "Nothing is carried out (mode: advisory): decisions are logged and published."
    match actuator:
        case ProcessActuator():
            return "Replicas are processes of this machine."
        case RayActuator(namespace=namespace):
            return f"Replicas are actors of Ray's namespace {namespace}{_of_ray(actuator)}."
        case KubernetesActuator(namespace=namespace, prefill=prefill, decode=decode):
            return (
                f"Replicas are pods of the Deployments {prefill.name} and {decode.name} in namespace {namespace}, "
                "whose scale is set."
            )
        case PublishActuator():
            return "Nothing is carried out: the sizes are published on /metrics, for HPA or KEDA to act on."


def _of_ray(actuator: RayActuator) -> str:
    resources = ", ".join(f"{amount:g} {name}" for name, amount in actuator.resources_per_device.items())
    nodes = "; Ray's autoscaler is asked for nodes" if actuator.request_nodes else ""
    return f", with {resources} for each device{nodes}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def changes(old: BaseModel, new: BaseModel, where: str = "") -> Iterator[str]:
    """Say what differs between two policies, or two parts of one called `where`; a sentence for each field."""
    before, after = dict(_fields(old, where)), dict(_fields(new, where))
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            yield f"{key} is {after.get(key, 'removed')}, was {before.get(key, 'not there')}"


def _fields(given: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield all fields of a part of a policy by the names that they have in a file, and what they hold."""
    match given:
        case BaseModel():
            for name in type(given).model_fields:
                held = getattr(given, name)
                key = f"{place}.{key_of(name)}" if place else key_of(name)
                yield from _fields(in_units(held) if name.endswith("_s") else held, key)
        case dict():
            for name, held in given.items():
                yield from _fields(held, f"{place}.{name}")
        case (BaseModel(), *_):
            for index, held in enumerate(given):
                yield from _fields(held, f"{place}.{index}")
        case tuple():
            yield place, ", ".join(map(str, given)) or "none"
        case float():
            yield place, f"{given:g}"
        case _:
            yield place, "by default" if given is None else str(given)
