"""`pdserve autoscale simulate`: what a policy would do to a trace, and what other ways to scale would."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import ProfileFile, Sizes
from pdserve.cli.results import JsonFile, PlotFile, report, show, writable
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.autoscaler.schema import Policy
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
        float, typer.Option(min=0.01, max=1000, help="Times as many requests in the same time.")
    ] = 1.0,
    window: Annotated[
        str | None, typer.Option(metavar="A-B", help="Only the requests of these seconds of the trace.")
    ] = None,
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
    plot: PlotFile = None,
    log_file: Annotated[
        Path | None, typer.Option("--log", help="Write the decisions there, a line each.", callback=writable("--log"))
    ] = None,
) -> None:
    """Simulate a policy under a trace: attainment, refusals, replicas and device-hours over time."""
    from pdserve.autoscaler.loading import load
    from pdserve.capacity import scaling_report
    from pdserve.capacity.versus import checked, simulate_all

    rivals = checked(versus or ())
    wanted, requests = load(policy), _requests(trace, sizes, window, rate_scale)
    scene = replace(
        _scene(wanted, requests, profile, startup, (prefill, decode)),
        slow=tuple(slow_stretch(each) for each in slow or ()),
    )
    runs = simulate_all(scene, wanted, rivals, report)
    starts = " and ".join(f"{each_s:g}" for each_s in scene.startup_s.values())
    title = f"{requests.name}, {len(requests.arrivals)} requests; {scene.objective}; start-up {starts} s"
    results = scaling_report.results(runs, wanted, scene.objective, title)
    show(json_file, results, scaling_report.sheet(runs, wanted, scene.objective, title, ()))
    if plot is not None:
        scaling_report.plot(runs, requests, scene.objective, title, plot)
    if log_file is not None:
        log_file.write_text("".join(f"{line}\n" for line in scaling_report.log(runs[0])), encoding="utf-8")


def _scene(
    policy: "Policy",
    requests: "Workload",
    profile: Path | None,
    startup: str | None,
    replicas: tuple[int | None, int | None],
) -> "Scene":
    """Return what is simulated, without slow stretches. `replicas`: of each pool at the start, by default the least."""
    from pdserve.capacity.fleet import POOLS
    from pdserve.capacity.scaling import Scene
    from pdserve.capacity.shape import Shape
    from pdserve.measure.outcomes import Objective
    from pdserve.perfmodel.profile import read_profile, shipped_profile

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


def _requests(trace: str, sizes: Sizes, window: str | None, rate_scale: float) -> "Workload":
    """Return the requests of a trace from 0 s on."""
    from math import inf

    read = sizes.read(trace)
    return read.between(*(0.0, inf) if window is None else stretch("--window", window)).multiplied(
        rate_scale, sizes.seed
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
