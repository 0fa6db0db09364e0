"""Commands that simulate: what a cluster could serve, and how a policy would scale it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import WORKLOAD_HELP, Goodput, ProfileFile, Sizes, checked_rate
from pdserve.cli.results import HtmlFile, JsonFile, draw, report, show, writable
from pdserve.errors import CommandError, ConfigError
from pdserve.measure.outcomes import Objective, parse_objective

if TYPE_CHECKING:
    from pdserve.autoscaler.schema import Policy
    from pdserve.capacity.long_run import Question
    from pdserve.capacity.scaling import Scene, Slow
    from pdserve.measure.workload import Workload

_WHOLE_TRACE = Sizes(num_prompts=1_000_000)


@grouped_flags
def simulate(
    policy: Annotated[Path, typer.Argument(help="The policy file.")],
    trace: Annotated[str, typer.Option(metavar="FILE", help="Requests, as `pdserve sim --workload` takes them.")],
    sizes: Sizes = _WHOLE_TRACE,
    profile: ProfileFile = None,
    startup: Annotated[
        str | None,
        typer.Option(help="Time from an order to a replica that serves, such as 30s; by default the policy's."),
    ] = None,
    rate_scale: Annotated[
        float, typer.Option(min=0.01, max=1000, help="Factor for the number of requests in the same time.")
    ] = 1.0,
    window: Annotated[
        str, typer.Option(metavar="A-B", help="Only the requests of these seconds of the trace.")
    ] = "0-inf",
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="X@A-B", help="Steps take X times as long from second A to B; repeatable."),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Prefill replicas at the start; by default the least.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="Decode replicas at the start; by default the least.")
    ] = None,
    versus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="static|hpa|planner",
            help="Also the smallest static pools that attain as much; HPA on queue length and KV usage; the published "
            "rules of Dynamo's planner. Repeatable.",
        ),
    ] = None,
    json_file: JsonFile = None,
    html: HtmlFile = None,
    log_file: Annotated[
        Path | None, typer.Option("--log", help="Write the decisions there, a line each.", callback=writable("--log"))
    ] = None,
) -> None:
    """Simulate a policy under a trace: attainment, refusals, replicas and device-hours over time."""
    from pdserve.autoscaler.schema import load
    from pdserve.capacity import scaling
    from pdserve.capacity.versus import checked, simulate_all

    rivals = checked(versus or ())
    wanted = load(policy)
    requests = sizes.read(trace).between(*stretch("--window", window)).multiplied(rate_scale, sizes.seed)
    scene = replace(
        _scene(wanted, requests, profile, startup, (prefill, decode)),
        slow=tuple(slow_stretch(each) for each in slow or ()),
    )
    runs = simulate_all(scene, wanted, rivals, report)
    starts = " and ".join(f"{each_s:g}" for each_s in scene.startup_s.values())
    title = f"{requests.name}, {len(requests.arrivals)} requests; {scene.objective}; start-up {starts} s"
    results = [scaling.result(each, wanted, scene.objective) for each in runs]
    table = show(json_file, results, title, results={"title": title, "runs": results})
    draw(html, "A policy simulated", title, table, scaling.charts(runs, requests, scene.objective))
    if log_file is not None:
        log_file.write_text("".join(f"{line}\n" for line in scaling.log(runs[0])), encoding="utf-8")


def _scene(
    policy: "Policy",
    requests: "Workload",
    profile: Path | None,
    startup: str | None,
    replicas: tuple[int | None, int | None],
) -> "Scene":
    """Return what is simulated, without slow stretches. `replicas`: of each pool at the start, by default the least."""
    from pdserve.capacity.scaling import Scene
    from pdserve.capacity.worker import Shape
    from pdserve.perfmodel.profile import read_profile, shipped_profile
    from pdserve.roles import POOLS

    pools = policy.pools
    startup_s = None if startup is None else _seconds("--startup", startup)
    return Scene(
        profile=read_profile(profile or shipped_profile()),
        workload=requests,
        objective=Objective(policy.objectives.ttft_s, policy.objectives.tpot_s),
        shape=Shape(
            replicas[0] or pools.prefill.min_replicas,
            replicas[1] or pools.decode.min_replicas,
            pools.prefill.devices_per_replica,
            pools.decode.devices_per_replica,
            local_prefill=False,
        ),
        startup_s={role: pools.of(role).startup_s if startup_s is None else startup_s for role in POOLS},
    )


def slow_stretch(text: str) -> "Slow":
    from pdserve.capacity.scaling import Slow

    factor, _, when = text.partition("@")
    try:
        times = float(factor)
    except ValueError:
        times = 0.0
    if not 0.01 <= times <= 100:
        raise ConfigError(f"--slow: {text!r} is not X@A-B, with X from 0.01 to 100")
    return Slow(times, *stretch("--slow", when))


def stretch(flag: str, text: str) -> tuple[float, float]:
    """Return the seconds that A-B means."""
    first, _, last = text.partition("-")
    try:
        from_s, until_s = float(first), float(last)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not A-B, in seconds") from None
    if not 0 <= from_s < until_s:
        raise ConfigError(f"{flag}: {text!r} does not end after it begins")
    return from_s, until_s


def _seconds(flag: str, text: str) -> float:
    from pdserve.autoscaler.section import seconds

    try:
        return float(seconds(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r}: {error}") from None


WorkloadText = Annotated[str, typer.Option(metavar="W", help=WORKLOAD_HELP)]
Poisson = Annotated[
    bool, typer.Option(help="Random arrivals instead of the trace's, and another order when it is repeated.")
]
Attainment = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of all requests that has to meet both objectives.")
]
_OBJECTIVES = ["ttft:250", "tpot:100"]
_MANY, _SOME = Sizes(num_prompts=10_000), Sizes(num_prompts=5_000)


@grouped_flags
def sim(
    workload: WorkloadText = "512x128",
    goodput: Goodput = _OBJECTIVES,
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
    html: HtmlFile = None,
) -> None:
    """Simulate a cluster under load: attainment, goodput, percentiles, utilization."""
    from pdserve.capacity import planner
    from pdserve.capacity.long_run import measure
    from pdserve.capacity.worker import Shape
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
    sizes: Sizes = _SOME,
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


def _question(workload: str, goodput: Goodput, profile: Path | None, sizes: Sizes, *, poisson: bool) -> "Question":
    from pdserve.capacity.long_run import Question
    from pdserve.perfmodel.profile import read_profile, shipped_profile

    requests = sizes.read(workload)
    requests = requests.poisson(sizes.seed) if poisson else requests
    costs, goal = read_profile(profile or shipped_profile()), parse_objective(*goodput or ())
    return Question(costs, requests, goal, sizes.num_prompts)
