"""Results of simulations as a table, as JSON and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from pdserve.capacity.long_run import Point
from pdserve.capacity.planner import Plan
from pdserve.capacity.search import Highest
from pdserve.measure.percentiles import shown_all
from pdserve.measure.tables import Column, Sheet

_COLUMNS = (
    Column("cluster", is_text=True),
    Column("policy", rank=1, is_text=True),
    Column("req/s/GPU"),
    Column("attainment", "share of all requests within both objectives, % and half of its 95 % interval"),
    Column("state", is_text=True),
    Column("goodput/GPU", "requests/s within both objectives", rank=5),
    Column("refused", "%", rank=2),
    Column("TTFT", "p50 / p90 / p99, ms", rank=4),
    Column("TPOT", "p50 / p90 / p99, ms", rank=4),
    Column("busy", "share of the time that prefill and decode workers compute, %", rank=6),
    Column("requests", "simulated", rank=7),
)


def sheet(points: Sequence[Point], title: str, notes: Sequence[str] = ()) -> Sheet:
    """Return one row a point."""
    states = filter(None, map(_state_note, points))
    return Sheet(title, _COLUMNS, [_row(point) for point in points], [*states, *notes])


def _row(point: Point) -> tuple[str, ...]:
    low, high = point.attainment_interval
    is_known = low > 0 or high < 1
    return (
        str(point.shape),
        point.policy,
        f"{point.rate_per_gpu:.2f}",
        f"{100 * point.attainment:.1f} ± {50 * (high - low):.1f}" if is_known else "?",
        "grows" if point.keeps_up is False else "steady" if point.is_settled else "unsettled",
        f"{point.goodput_per_gpu:.2f}" if is_known else "?",
        f"{100 * point.refused:.1f}" if is_known else "?",
        shown_all(point.ttft_s, 1e3),
        shown_all(point.tpot_s, 1e3),
        " ".join(f"{100 * share:.0f}" for share in point.utilization.values()),
        str(point.num_requests),
    )


def _state_note(point: Point) -> str:
    at = f"{point.shape}, {point.policy}, {point.rate_per_gpu:.2f} requests/s a GPU"
    if point.keeps_up is False:
        return f"{at}: the cluster does not keep up, {point.growth:.0%} of what arrives piles up"
    return "" if point.is_settled else f"{at}: not settled by {point.num_requests} requests; --num-prompts allows more"


def rate_note(found: Highest) -> str:
    """Return between which rates the highest one lies."""
    if not found.at_least and found.below is None:
        return "highest rate: not settled at any rate; --num-prompts allows more"
    low = f"{found.at_least:.2f}" if found.at_least else "0"
    high = "an unknown rate" if found.below is None else f"{found.below:.2f}"
    return f"highest rate: for sure between {low} and {high} requests/s a GPU"


def results(points: Sequence[Point], title: str, found: Sequence[Highest] = ()) -> dict[str, object]:
    """Return points, and how well highest rates are known, in the same order."""
    known = [{"at_least": each.at_least, "below": each.below, "is_settled": each.is_settled} for each in found]
    return {"title": title, "points": list(points), "known": known}


def plan_report(plan: Plan, num_gpus: int) -> tuple[dict[str, object], Sheet]:
    """Return a plan as results and as a table, beside the best colocated cluster."""
    points = [plan.best] + ([plan.colocated] if plan.colocated and plan.colocated is not plan.best else [])
    title = f"{plan.best.shape}: {plan.best.rate_per_gpu * num_gpus:.1f} requests/s on {num_gpus} GPUs"
    notes = (
        rate_note(plan.known),
        f"{plan.num_tried} clusters tried. What binds: {plan.binds}.",
        f"It takes {plan.kv_share:.0%} of the KV pages that fit.",
    )
    return results(points, title, [plan.known]), sheet(points, title, notes)


def plot(points: Sequence[Point], title: str, wanted: float, path: Path) -> None:
    """Draw attainment over the rate, a line for each cluster and policy."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that only plots need

    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(f"{point.shape}, {point.policy}", []).append(point)
    for name, line in lines.items():
        ordered = sorted(line, key=lambda point: point.rate_per_gpu)
        axes.plot([p.rate_per_gpu for p in ordered], [100 * p.attainment for p in ordered], marker="o", label=name)
    axes.axhline(100 * wanted, linestyle=":", color="grey")
    axes.set_xlabel("requests per second and GPU")
    axes.set_ylabel("requests within both objectives, %")
    axes.set_ylim(0, 102)
    axes.set_title(title)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")
