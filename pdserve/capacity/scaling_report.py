"""What came of scaled pools: figures, a plot over time, and the log of decisions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.autoscaler.observation import State
from pdserve.autoscaler.schema import Policy
from pdserve.capacity.fleet import Sizes
from pdserve.capacity.scaling import Scaled
from pdserve.measure.outcomes import Objective
from pdserve.measure.summary import percentiles
from pdserve.measure.workload import Workload
from pdserve.roles import POOLS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def plot(runs: Sequence[Scaled], workload: Workload, objective: Objective, title: str, path: Path) -> None:
    """Draw demand, the first run's replicas, and attainment and refusals of all runs, over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that only plots need

    figure = Figure(figsize=(9, 9))
    demand, replicas, attained, refused = figure.subplots(4, 1, sharex=True)
    _plot_demand(demand, workload)
    _plot_replicas(replicas, runs)
    for run in runs:
        shares = attained_over_time(run, objective)
        attained.plot([at_s / 60 for at_s, _ in shares], [100 * share for _, share in shares], label=run.name)
        _plot_refused(refused, run)
    attained.set_ylabel("within both, %")
    attained.set_ylim(top=100.5)
    attained.legend(fontsize="x-small")
    refused.set_ylabel("refused / s")
    refused.set_xlabel("minutes")
    demand.set_title(title, fontsize="medium")
    for axes in (demand, replicas, attained, refused):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _plot_demand(axes: "Axes", workload: Workload) -> None:
    requests, tokens = dict[int, float](), dict[int, float]()
    for each in workload.arrivals:
        place = int(each.at_s / _BIN_S)
        requests[place] = requests.get(place, 0) + 1 / _BIN_S
        tokens[place] = tokens.get(place, 0) + (each.prompt_tokens + each.output_tokens) / _BIN_S / 1000
    minutes = sorted(requests)
    axes.plot([place + 0.5 for place in minutes], [requests[place] for place in minutes], color="black")
    axes.set_ylabel("requests / s")
    other = axes.twinx()
    other.plot([place + 0.5 for place in minutes], [tokens[place] for place in minutes], color="grey", linestyle=":")
    other.set_ylabel("thousand tokens / s", color="grey")


def _plot_replicas(axes: "Axes", runs: Sequence[Scaled]) -> None:
    """Draw what serves, and shade what is paid for beside."""
    first = runs[0]
    for role, color in zip(POOLS, ("tab:orange", "tab:blue"), strict=True):
        minutes = [each.at_s / 60 for each in first.sizes] + [first.span_s / 60]
        ready, paid = (
            [each.count(role, State.READY) for each in first.sizes],
            [each.count(role) for each in first.sizes],
        )
        axes.step(minutes, [*ready, ready[-1]], where="post", color=color, label=f"{role}, {first.name}")
        axes.fill_between(minutes, [*ready, ready[-1]], [*paid, paid[-1]], step="post", color=color, alpha=0.25)
    for run, style in zip(runs[1:], (":", "--", "-."), strict=False):
        minutes = [each.at_s / 60 for each in run.sizes] + [run.span_s / 60]
        paid = [sum(each.count(role) for role in POOLS) for each in run.sizes]
        axes.step(minutes, [*paid, paid[-1]], where="post", color="grey", linestyle=style, label=f"both, {run.name}")
    axes.set_ylabel("replicas")
    axes.legend(fontsize="x-small")


def _plot_refused(axes: "Axes", run: Scaled) -> None:
    counts = [0] * (int(run.span_s / _BIN_S) + 1)
    for outcome in run.outcomes:
        counts[int(outcome.sent_s / _BIN_S)] += outcome.is_refused
    axes.plot([place + 0.5 for place in range(len(counts))], [count / _BIN_S for count in counts], label=run.name)
