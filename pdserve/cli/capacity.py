"""`pdserve sim` and `pdserve plan`: what a cluster could serve, without one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import WORKLOAD_HELP, Goodput, ProfileFile, Sizes, checked_rate, objective
from pdserve.cli.results import JsonFile, PlotFile, show

if TYPE_CHECKING:
    from pdserve.capacity.long_run import Question

WorkloadText = Annotated[str, typer.Option(metavar="W", help=WORKLOAD_HELP)]
Poisson = Annotated[
    bool, typer.Option(help="Random arrivals instead of the trace's, and another order when it is repeated.")
]
Attainment = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of all requests to serve within both.")]
_MANY, _SOME = Sizes(num_prompts=10_000), Sizes(num_prompts=5_000)


@grouped_flags
def sim(
    workload: WorkloadText = "512x128",
    goodput: Goodput = "ttft:250 tpot:100",
    sizes: Sizes = _MANY,
    profile: ProfileFile = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: colocated.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Devices of a prefill worker.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Devices of a decode worker.")] = 1,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill worker's step.")] = 2048,
    decode_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step that mixes prompts and decoding.")] = 512,
    placement: Annotated[list[str] | None, typer.Option(help="How requests are placed; repeatable.")] = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second on average, repeatable; by default the highest is searched."),
    ] = None,
    attainment: Attainment = 0.9,
    poisson: Poisson = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Simulate a cluster under load: attainment, goodput, percentiles, utilization."""
    from rich.console import Console

    from pdserve.capacity import planner
    from pdserve.capacity.long_run import measure
    from pdserve.capacity.planner import highest_rate
    from pdserve.capacity.shape import Shape
    from pdserve.errors import CommandError, ConfigError
    from pdserve.measure.tables import counted
    from pdserve.router.policies import POLICIES

    rates, names = [checked_rate(each) for each in request_rate or ()], placement or ["goodput"]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--placement: {name!r} is none of {', '.join(POLICIES)}")
    question = _question(workload, goodput, profile, sizes, poisson=poisson)
    shape = Shape(prefill, decode, prefill_tp, decode_tp, prefill_chunk, decode_chunk)
    title = f"{question.profile.model}, {question.workload.name}, {question.objective}"
    found, points = [], []
    with counted(Console(stderr=True), "simulating", len(names) * max(1, len(rates))) as advance:
        for name in names:
            if not rates:
                found.append(highest_rate(question, shape, name, attainment))
                advance()
            for rate in rates:
                points.append(measure(question, shape, name, rate / shape.num_gpus))
                advance()
    points += [each.point for each in found if each.point is not None]
    notes = [f"{name}: {planner.rate_note(each)}" for name, each in zip(names, found, strict=False)]
    if not points:
        raise CommandError(f"no rate is known to keep {attainment:.0%} within {goodput}: {'; '.join(notes)}")
    show(json_file, planner.results(points, title, found), planner.sheet(points, title, notes))
    if plot is not None:
        planner.plot(points, title, attainment, plot)


@grouped_flags
def plan(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs there are.")],
    goodput: Goodput = "ttft:250 tpot:100",
    workload: WorkloadText = "512x128",
    sizes: Sizes = _SOME,
    profile: ProfileFile = None,
    attainment: Attainment = 0.9,
    poisson: Poisson = False,
    json_file: JsonFile = None,
) -> None:
    """Search the split into prefill and decode workers that serves most within the objectives."""
    from rich.console import Console

    from pdserve.capacity import planner
    from pdserve.errors import CommandError
    from pdserve.measure.tables import counted

    question = _question(workload, goodput, profile, sizes, poisson=poisson)
    total = sum(1 for _ in planner.tries(question.profile, gpus))
    with counted(Console(stderr=True), "trying clusters", total) as advance:
        found = planner.plan(question, gpus, attainment, lambda *_: advance())
    if found is None:
        raise CommandError(
            f"no cluster of {gpus} GPUs is known to serve {attainment:.0%} within {goodput} at any rate, "
            f"by {sizes.num_prompts} requests at each (--num-prompts)"
        )
    results, table = planner.plan_report(found, gpus)
    show(json_file, results, table)


def _question(workload: str, goodput: str, profile: Path | None, sizes: Sizes, *, poisson: bool) -> "Question":
    from pdserve.capacity.long_run import Question
    from pdserve.perfmodel.profile import read_profile, shipped_profile

    requests = sizes.read(workload)
    costs = read_profile(profile or shipped_profile())
    return Question(costs, requests.poisson(sizes.seed) if poisson else requests, objective(goodput), sizes.num_prompts)
