"""Measurements of a running cluster, of a part of one, and of a simulated one."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import (
    DEFAULT_MODEL,
    DOORS,
    THIS_MACHINES_ROUTER,
    WORKLOAD_HELP,
    ClusterName,
    Goodput,
    HttpServer,
    Model,
    Placements,
    ProfileFile,
    RouterFlags,
    WorkloadFlags,
    WorkloadText,
    checked_rate,
)
from pdserve.cli.results import HtmlFile, JsonFile, draw, fail_unless_right, report, run, show, writable
from pdserve.errors import CommandError, ConfigError

if TYPE_CHECKING:
    from pdserve.capacity.long_run import Question

_SIZES = WorkloadFlags()


@grouped_flags
def load(
    more: Annotated[list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="More workloads.")] = None,
    workload: Annotated[list[str] | None, typer.Option(metavar="W", help=f"{WORKLOAD_HELP} Repeatable.")] = None,
    sizes: WorkloadFlags = _SIZES,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests a second on average: traces are stretched to it, others come at random moments. By default "
            "traces keep their times, and others come all at once. Repeatable: each workload is sent at each rate."
        ),
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests under way at once, at most.")] = None,
    goodput: Goodput = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sampling temperature; 0 takes the likeliest tokens.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample from this much probability.")] = 1.0,
    door: Annotated[
        list[str] | None, typer.Option(**DOORS, help="Repeatable: then they take turns. By default grpc.")
    ] = None,
    server: HttpServer = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each workload is sent.")] = 1,
    json_file: JsonFile = None,
    html: HtmlFile = None,
    router: RouterFlags = THIS_MACHINES_ROUTER,
) -> None:
    """Send workloads of random prompts, answered to full length, and measure what a client sees.

    Exit status 1 if a request had no whole answer and was not refused for lack of room either.
    """
    from pdserve.measure.client import Sampling
    from pdserve.measure.load import Load, door_notes, measure_load
    from pdserve.measure.outcomes import parse_objective

    rates = [checked_rate(rate) for rate in request_rate] if request_rate else [None]
    read = [sizes.read(text) for text in (*(workload or ()), *(more or ()))]
    workloads = [(each, rate) for each in read for rate in rates]
    if not workloads:
        raise ConfigError("--workload is needed, for example --workload 16x32x128")
    goal = parse_objective(*goodput or ())
    sampling = Sampling(temperature, top_p, sizes.seed)
    doors = router.doors(door or ["grpc"], server)
    runs = run(measure_load(doors, Load(workloads, goal, sizes.seed, max_concurrency, sampling, rounds)))
    summaries = [each.summary for each in runs]
    notes = [f"goodput counts requests that ended well ({goal})", *door_notes(runs)]
    show(json_file, summaries, "", *notes, results={"objective": goal, "runs": summaries})
    if html is not None:
        from pdserve.measure.html_report import write_report

        write_report(html, ", ".join(each.name for each in read), runs, goal)
    fail_unless_right(summaries)


def router(
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 64,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests placed.")] = 2000,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    json_file: JsonFile = None,
) -> None:
    """Measure decisions per second of one core, for each policy, without network or engine."""
    from pdserve.measure.router import measure_policies

    found = measure_policies(prefill, decode, num_prompts, input_len)
    title = f"{prefill} + {decode} workers, {num_prompts} requests of {input_len} tokens"
    show(json_file, found, title)


def frontend(
    model: Model = DEFAULT_MODEL,
    door: Annotated[list[str] | None, typer.Option(**DOORS, help="Repeatable; by default both.")] = None,
    step_ms: Annotated[list[float] | None, typer.Option(help="Milliseconds of a decode step; repeatable.")] = None,
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; repeatable.")] = None,
    output_len: Annotated[list[int] | None, typer.Option(help="Tokens of an answer; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each stream, after one that is not counted.")] = 4,
    num_frontends: Annotated[
        list[int] | None, typer.Option(help="Frontends in processes of their own; 0, the default: none. Repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, in turn; medians are shown.")] = 1,
    cpu_share: Annotated[
        float | None, typer.Option(min=0.01, help="Cores that the router gets for each of its frontends.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the CPU time that a streamed request takes of a router, with workers that replay known tokens."""
    from pdserve.measure.client import Door
    from pdserve.measure.frontend import PROMPT_WORDS, Load, gains, measure_frontend
    from pdserve.measure.router import measure_steps

    doors = map(Door, door or ("grpc", "http"))
    kinds = product(step_ms or (20.0, 2.0), doors, streams or (64, 256), output_len or (64, 8))
    loads = [
        Load(each, ms / 1e3, num, tokens, rounds, count)
        for ms, each, num, tokens in kinds
        for count in num_frontends or (0,)
    ]
    found = run(measure_frontend(model, loads, repeats, report, cpu_share))
    core = measure_steps(num_sequences=256, num_steps=64)
    title = f"Prompts of {PROMPT_WORDS} words"
    times = f"{1e3 * core.core_s:.2f} ms of the core, {1e3 * core.wire_s:.2f} ms to read it off the link"
    notes = f"a step of 256 sequences: {times}", *gains(found)
    show(json_file, found, title, *notes, results={"runs": found, "core": core})


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
