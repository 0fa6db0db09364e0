"""Step costs of a running cluster, and simulated clusters: how one serves, and which one to have."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.base.errors import CommandError
from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import ClusterName, Goodput, Placements, ProfileFile, WorkloadFlags, WorkloadText, checked_rate
from pdserve.cli.results import HtmlFile, JsonFile, draw, report, run, show, writable

if TYPE_CHECKING:
    from pdserve.capacity.long_run import Question


def profile(
    output: Annotated[Path, typer.Argument(help="File to write, YAML.", callback=writable("OUTPUT"))],
    name: ClusterName = "default",
    bursts: Annotated[int, typer.Option(min=20, help="Bursts of requests to send.")] = 120,
    max_length: Annotated[int, typer.Option(min=2, help="Most tokens of a prompt and its answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the bursts.")] = 0,
) -> None:
    """Sweep the workers of a running cluster with requests of many shapes; write what their steps cost."""
    from pdserve.launch.folder import read_state
    from pdserve.measure import profile as profiles
    from pdserve.perfmodel.profile import write_profile

    source = f"pdserve profile --bursts {bursts} --seed {seed}"
    sent = profiles.bursts(bursts, max_length, seed)
    write_profile(output, run(profiles.measure_profile(read_state(name), sent, source, report)))


Poisson = Annotated[
    bool, typer.Option(help="Random arrivals instead of the trace's, and another order when it is repeated.")
]
Attainment = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of all requests that has to meet both objectives.")
]
_OBJECTIVES = ["ttft:250", "tpot:100"]
_MANY, _SOME = WorkloadFlags(num_prompts=10_000), WorkloadFlags(num_prompts=5_000)


@grouped_flags
def sim(
    workload: WorkloadText = "512x128",
    goodput: Goodput = _OBJECTIVES,
    sizes: WorkloadFlags = _MANY,
    profile: ProfileFile = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 0: colocated.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Devices of a prefill worker.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Devices of a decode worker.")] = 1,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill worker's step.")] = 2048,
    decode_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step that mixes prompts and decoding.")] = 512,
    placement: Placements = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second on average, repeatable; by default the highest is searched."),
    ] = None,
    attainment: Attainment = 0.9,
    poisson: Poisson = False,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Simulate a cluster under load: attainment, goodput, percentiles, utilization."""
    from pdserve.capacity import planner
    from pdserve.capacity.long_run import measure
    from pdserve.capacity.worker import Shape
    from pdserve.measure.tables import counted

    rates, names = [checked_rate(each) for each in request_rate or ()], placement or ["goodput"]
    question = _question(workload, goodput, profile, sizes, poisson=poisson)
    shape = Shape(prefill, decode, prefill_tp, decode_tp, prefill_chunk, decode_chunk)
    title = f"{question.profile.model}, {question.workload.name}, {question.objective}"
    found, points = [], []
    with counted("simulating", len(names) * max(1, len(rates))) as advance:
        for name in names:
            if not rates:
                found.append(planner.highest_rate(question, shape, name, attainment))
                advance()
            for rate in rates:
                points.append(measure(question, shape, name, rate / shape.num_gpus))
                advance()
    points += [each.point for each in found if each.point is not None]
    notes = [f"{name}: {planner.rate_note(each)}" for name, each in zip(names, found, strict=False)]
    if not points:
        raise CommandError(f"no rate is known to keep {attainment:.0%} within {question.objective}: {'; '.join(notes)}")
    results = planner.results(points, title, found)
    table = show(json_file, map(planner.figures, points), title, *notes, results=results)
    draw(html, "Attainment", title, table, [planner.chart(points, attainment)])


@grouped_flags
def plan(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs there are.")],
    goodput: Goodput = _OBJECTIVES,
    workload: WorkloadText = "512x128",
    sizes: WorkloadFlags = _SOME,
    profile: ProfileFile = None,
    attainment: Attainment = 0.9,
    poisson: Poisson = False,
    json_file: JsonFile = None,
) -> None:
    """Search the split into prefill and decode workers that serves most within the objectives."""
    from pdserve.capacity import planner
    from pdserve.measure.tables import counted

    question = _question(workload, goodput, profile, sizes, poisson=poisson)
    total = sum(1 for _ in planner.tries(question.profile, gpus))
    with counted("trying clusters", total) as advance:
        found = planner.plan(question, gpus, attainment, lambda *_: advance())
    if found is None:
        raise CommandError(
            f"no cluster of {gpus} GPUs is known to serve {attainment:.0%} within {question.objective} at any rate, "
            f"by {sizes.num_prompts} requests at each (--num-prompts)"
        )
    points, title, notes = planner.plan_report(found, gpus)
    results = planner.results(points, title, [found.known])
    show(json_file, map(planner.figures, points), title, *notes, results=results)


def _question(
    workload: str, goodput: Goodput, profile: Path | None, sizes: WorkloadFlags, *, poisson: bool
) -> "Question":
    from pdserve.capacity.long_run import Question
    from pdserve.measure.outcomes import parse_objective
    from pdserve.perfmodel.profile import read_profile, shipped_profile

    requests = sizes.read(workload)
    requests = requests.poisson(sizes.seed) if poisson else requests
    costs, goal = read_profile(profile or shipped_profile()), parse_objective(*goodput or ())
    return Question(costs, requests, goal, sizes.num_prompts)
