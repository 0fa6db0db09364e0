"""`pdserve bench accuracy`, `overload`, `simulator`, and `pdserve profile`: measurements that teach a router."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pdserve.cli.options import ClusterName
from pdserve.cli.output import JsonFile, show, writable

if TYPE_CHECKING:
    from pdserve.bench.summary import Slo
    from pdserve.launch.plan import ClusterSpec

_MOST_SECONDS = 86_400

Model = Annotated[str, typer.Argument(help="A path, or a name from the catalog.")]
WorkloadText = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar="W",
        help="A trace (.csv, .jsonl, .json), a slice that comes with pdserve (azure-conv, azure-code, mooncake), or "
        "mean random lengths INxOUT.",
    ),
]
Scale = Annotated[float, typer.Option(min=1e-3, help="Factor for all lengths.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longer prompts and answers are cut.")]
Prefill = Annotated[int, typer.Option(min=1, help="Prefill workers.")]
Decode = Annotated[int, typer.Option(min=1, help="Decode workers.")]
Loads = Annotated[
    list[float] | None, typer.Option(min=0.01, max=100, help="Share of the capacity; repeatable.", show_default=False)
]
Seconds = Annotated[float, typer.Option(min=1, max=_MOST_SECONDS, help="Of load at each rate.")]
Seed = Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")]

Threads = Annotated[int | None, typer.Option(min=1, help="Of each worker's engine.", show_default=False)]
Calibration = Annotated[float, typer.Option(min=2, max=_MOST_SECONDS, help="Seconds of load before.")]
SloText = Annotated[
    str, typer.Option(help="ttft=MS,tpot=MS; by default multiples of what is seen at light load.", show_default=False)
]

Result = TypeVar("Result")

DEFAULT_MODEL = "smollm2-135m-instruct"
AZURE_MEANS = "1155x211"  # of Azure's conversation trace of 2023


def accuracy(
    model: Model = DEFAULT_MODEL,
    workload: WorkloadText = AZURE_MEANS,
    scale: Scale = 0.125,
    max_tokens: MaxTokens = 1024,
    prefill: Prefill = 1,
    decode: Decode = 1,
    threads: Threads = None,
    load: Loads = None,
    seconds: Seconds = 60,
    calibration: Calibration = 60,
    profile: Annotated[
        Path | None, typer.Option(help="To start from; by default OPT-13B on A100, wrong here.", show_default=False)
    ] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with seen times to first token and per token, starting from a wrong profile."""
    from pdserve.experiments.lengths import read_lengths
    from pdserve.experiments.live import live_cluster
    from pdserve.experiments.prediction import Trial, predict
    from pdserve.experiments.report import error_sheet, prediction_json
    from pdserve.perfmodel.profile import shipped_profile

    lengths = read_lengths(workload, scale, max_tokens, seed)
    trial = Trial(lengths, tuple(load or (0.3, 0.6, 0.9)), calibration, seconds, seed)
    spec = cluster_spec(
        model, (prefill, decode), {"policy": "goodput", "profile": profile or shipped_profile()}, threads
    )

    async def measure() -> None:
        async with live_cluster(spec, tell) as cluster:
            found = await predict(cluster, trial, tell)
        table = error_sheet(found.runs, found.capacity_per_s, lengths.name)
        show(json_file, prediction_json(found, lengths.name), table)

    run(measure())


def overload(
    model: Model = DEFAULT_MODEL,
    workload: WorkloadText = AZURE_MEANS,
    scale: Scale = 0.125,
    max_tokens: MaxTokens = 1024,
    prefill: Prefill = 1,
    decode: Decode = 1,
    threads: Threads = None,
    load: Loads = None,
    policy: Annotated[list[str] | None, typer.Option(help="Of the router; repeatable.")] = None,
    slo: SloText = "",
    seconds: Seconds = 40,
    calibration: Calibration = 60,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Load clusters up to twice their capacity: goodput, what admitted requests attain, how fast others are refused."""
    from pdserve.experiments.lengths import read_lengths
    from pdserve.experiments.live import live_cluster
    from pdserve.experiments.overload import Goal, Point, Trial, find_goal, sweep
    from pdserve.experiments.report import overload_json, overload_sheet

    lengths = read_lengths(workload, scale, max_tokens, seed)
    trial = Trial(lengths, tuple(load or (0.5, 0.75, 1.0, 1.5, 2.0)), seconds, _slo(slo), seed)

    async def measure() -> None:
        goal: Goal | None = None
        points: list[Point] = []
        for name in policy or ("goodput", "round_robin"):
            spec = cluster_spec(model, (prefill, decode), {"policy": name}, threads)
            async with live_cluster(spec, tell) as cluster:
                found = await find_goal(cluster, trial, calibration / 2, tell)
                goal = goal or found  # one goal for all, so that loads are the same
                points += await sweep(cluster, name, goal, trial, tell)
        if goal is not None:
            table = overload_sheet(points, goal, lengths.name)
            show(json_file, overload_json(points, goal, lengths.name), table)

    run(measure())


def simulator(
    model: Model = DEFAULT_MODEL,
    workload: WorkloadText = AZURE_MEANS,
    scale: Scale = 0.125,
    max_tokens: MaxTokens = 1024,
    prefill: Prefill = 1,
    decode: Decode = 1,
    threads: Threads = None,
    load: Loads = None,
    policy: Annotated[str, typer.Option(help="Of the router.")] = "goodput",
    slo: SloText = "",
    seconds: Seconds = 60,
    calibration: Calibration = 60,
    seed: Seed = 0,
    json_file: JsonFile = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also write what was learnt.", show_default=False, callback=writable("--profile")),
    ] = None,
) -> None:
    """Serve a load live, and simulate the same requests with the step times that the live router has learnt."""
    from pdserve.experiments.lengths import read_lengths
    from pdserve.experiments.live import live_cluster
    from pdserve.experiments.overload import Trial, find_goal
    from pdserve.experiments.replay import replay
    from pdserve.experiments.report import replay_json, replay_sheet
    from pdserve.perfmodel.profile import write_profile

    lengths = read_lengths(workload, scale, max_tokens, seed)
    trial = Trial(lengths, tuple(load or (0.3, 0.6, 0.9, 1.2)), seconds, _slo(slo), seed)
    spec = cluster_spec(model, (prefill, decode), {"policy": policy}, threads)

    async def measure() -> None:
        async with live_cluster(spec, tell) as cluster:
            goal = await find_goal(cluster, trial, calibration / 2, tell)
            replays = await replay(cluster, policy, goal, trial, tell)
        found = [each for each, _ in replays]
        show(json_file, replay_json(found, goal, lengths.name), replay_sheet(found, goal, lengths.name))
        if profile is not None:
            write_profile(profile, replays[-1][1])

    run(measure())


def profile(
    output: Annotated[Path, typer.Argument(help="File to write, YAML.", callback=writable("OUTPUT"))],
    name: ClusterName = "default",
    bursts: Annotated[int, typer.Option(min=20, help="Bursts of requests to send.")] = 120,
    max_tokens: MaxTokens = 1024,
    seed: Seed = 0,
) -> None:
    """Sweep the workers of a running cluster with requests of many shapes; write what their steps cost."""
    from pdserve.experiments.learnt import learnt_profile
    from pdserve.experiments.live import connected
    from pdserve.experiments.sweep import bursts as shapes_of
    from pdserve.experiments.sweep import sweep
    from pdserve.launch.state import read_state
    from pdserve.perfmodel.profile import write_profile

    state = read_state(name)

    async def measure() -> None:
        async with connected(state) as cluster:
            await sweep(cluster, shapes_of(bursts, max_tokens, seed), tell)
            found = learnt_profile(await cluster.status(), f"pdserve profile --bursts {bursts} --seed {seed}")
        write_profile(output, found)

    run(measure())


def _slo(text: str) -> "Slo | None":
    from pdserve.bench.summary import parse_slo

    return parse_slo(text) if text else None


def cluster_spec(
    model: str, workers: tuple[int, int], router_flags: dict[str, object], threads: int | None
) -> "ClusterSpec":
    """Return a cluster that is started for a measurement: `workers` prefill and decode."""
    from pdserve.cli.models import fetched, model_name
    from pdserve.launch.plan import ClusterSpec

    return ClusterSpec(
        model=str(fetched(model)),
        served_model_name=model_name(model),
        num_prefill=workers[0],
        num_decode=workers[1],
        name="experiment",
        worker_flags={"num_threads": threads},
        router_flags=router_flags,
    )


def tell(text: str) -> None:
    """Say what goes on, beside the results."""
    typer.echo(text, err=True)


def run(measurement: "Coroutine[object, object, Result]") -> "Result":
    """Run a measurement of a live cluster; CommandError for what clusters, routers and networks do."""
    import grpc

    from pdserve.cli.failure import only_cause
    from pdserve.errors import CommandError

    try:
        return asyncio.run(measurement)
    except (grpc.aio.AioRpcError, ExceptionGroup) as error:
        cause = only_cause(error)
        if not isinstance(cause, grpc.aio.AioRpcError):
            raise
        raise CommandError(f"the router: {cause.code().name}: {cause.details()}") from error
