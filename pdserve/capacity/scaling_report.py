"""What came of scaled pools: figures, plots over time, and the log of decisions."""

from collections import Counter
from collections.abc import Iterable, Sequence

from pdserve.autoscaler.actuator import State
from pdserve.autoscaler.schema import Policy
from pdserve.capacity.fleet import Sizes
from pdserve.capacity.scaling import Scaled
from pdserve.measure.outcomes import Objective
from pdserve.measure.plots import Line, Plot, plot, stepped
from pdserve.measure.summary import percentiles
from pdserve.measure.workload import Workload
from pdserve.roles import POOLS

_BIN_S = 60.0


def device_hours(run: Scaled, policy: Policy) -> float:
    """Return the device-hours that a run took."""
    return sum(hours * policy.pools.of(role).devices_per_replica for role, hours in run.replica_hours.items())


def cost(run: Scaled, policy: Policy) -> float:
    """Return what a run cost, by the policy's prices."""
    return sum(hours * policy.pools.of(role).cost_per_replica_hour for role, hours in run.replica_hours.items())


def most_devices(run: Scaled, policy: Policy) -> int:
    """Return how many devices were held at once."""
    return max(_devices(sizes, policy) for sizes in run.sizes)


def _devices(sizes: Sizes, policy: Policy) -> int:
    return sum(sizes.count(role) * policy.pools.of(role).devices_per_replica for role in POOLS)


def result(run: Scaled, policy: Policy, objective: Objective) -> dict[str, object]:
    """Return all of a run but its single requests. Of lists, only the JSON has more than the table."""
    orders = Counter(noted.decision.verb for noted in run.orders if not noted.error and not noted.decision.advisory)
    served = [outcome for outcome in run.outcomes if outcome.is_good]
    return {
        "name": run.name,
        "attainment": run.attainment(objective),
        "refused": run.refused,
        "device_hours": device_hours(run, policy),
        "mean_replicas": {role: run.replica_hours[role] / run.span_s * 3600 for role in POOLS},
        "most_devices": most_devices(run, policy),
        "cost": cost(run, policy),
        "orders": orders,
        "ttft_s": percentiles(outcome.ttft_s for outcome in served if outcome.ttft_s is not None),
        "tpot_s": percentiles(outcome.tpot_s for outcome in served if outcome.tpot_s is not None),
        "num_requests": len(run.outcomes),
        "attainment_over_time": attained_over_time(run, objective),
        "sizes": [
            {"at_s": each.at_s, **{f"{s.value} {role}": each.counts[s][role] for s in State for role in POOLS}}
            for each in run.sizes
        ],
        "decisions": log(run),
    }


def log(run: Scaled) -> list[str]:
    """Return the decisions that were to be carried out, a line each."""
    return [
        f"{each.at_s:7.0f} s  {each.decision.text}{f'; failed: {each.error}' if each.error else ''}"
        for each in run.orders
    ]


def attained_over_time(run: Scaled, objective: Objective) -> list[tuple[float, float]]:
    """Return the share within both objectives of what came in each minute; its middle in seconds."""
    bins = [[0, 0] for _ in range(int(run.span_s / _BIN_S) + 1)]
    for outcome in run.outcomes:
        counts = bins[int(outcome.sent_s / _BIN_S)]
        counts[0] += 1
        counts[1] += outcome.meets(objective)
    return [((place + 0.5) * _BIN_S, good / count) for place, (count, good) in enumerate(bins) if count]


def charts(runs: Sequence[Scaled], workload: Workload, objective: Objective) -> list[Plot]:
    """Return demand, the first run's replicas, and attainment and refusals of all runs, over time."""
    tokens = ((each.at_s, each.prompt_tokens + each.output_tokens) for each in workload.arrivals)
    sent = Line("sent", _each_second((each.at_s, 1) for each in workload.arrivals))
    attained = [(run.name, attained_over_time(run, objective)) for run in runs]
    within = [Line(name, [(at_s / 60, 100 * share) for at_s, share in shares]) for name, shares in attained]
    refused = [Line(run.name, _each_second((each.sent_s, each.is_refused) for each in run.outcomes)) for run in runs]
    return [
        plot("Requests", ("minutes", "requests per second"), [sent]),
        plot("Tokens", ("minutes", "tokens per second"), [Line("prompts and answers", _each_second(tokens))]),
        plot("Replicas", ("minutes", "replicas"), _replicas(runs)),
        plot("Within both objectives", ("minutes", "% of requests"), within, y_end=100.0),
        plot("Refused", ("minutes", "requests per second"), refused),
    ]


def _each_second(counts: Iterable[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the middle of each minute, in minutes, and what was counted in a second of it."""
    sums = Counter[int]()
    for at_s, count in counts:
        sums[int(at_s / _BIN_S)] += count
    return [((place + 0.5) * _BIN_S / 60, sums[place] / _BIN_S) for place in range(max(sums, default=-1) + 1)]


def _replicas(runs: Sequence[Scaled]) -> list[Line]:
    """Return the replicas of each pool of the first run that serve and that are paid for, and those of the others."""
    first, lines = runs[0], list[Line]()
    for role in POOLS:
        lines.append(
            _over_time(f"{role}, {first.name}", first, [each.count(role, State.READY) for each in first.sizes])
        )
        lines.append(_over_time(f"{role}, paid for", first, [each.count(role) for each in first.sizes]))
    for run in runs[1:]:
        lines.append(_over_time(f"both, {run.name}", run, [sum(map(each.count, POOLS)) for each in run.sizes]))
    return lines


def _over_time(name: str, run: Scaled, counts: Sequence[int]) -> Line:
    points = [(each.at_s / 60, count) for each, count in zip(run.sizes, counts, strict=True)]
    return Line(name, stepped([*points, (run.span_s / 60, counts[-1])]))
