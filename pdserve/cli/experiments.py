"""Experiments on clusters that are started for them, and the profile of one that runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import ClusterName, Goodput, Loads, Sizes
from pdserve.cli.results import JsonFile, report, run, show, writable

_SIZES = Sizes(num_prompts=2000, scale=0.125, max_length=1024)
_LOADS, _SHORT_LOADS = Loads(), Loads(seconds=40)
_FOUR_WORKERS = Loads(prefill=2, decode=2, num_threads=1, seconds=45)


@grouped_flags
def accuracy(
    loads: Loads = _LOADS,
    sizes: Sizes = _SIZES,
    profile: Annotated[Path | None, typer.Option(help="To start from; by default OPT-13B on A100, wrong here.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with seen times to first token and per token, starting from a wrong profile."""
    from pdserve.measure.accuracy import accuracy_json, error_table, measure_accuracy
    from pdserve.perfmodel.profile import shipped_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9))
    spec = loads.spec(placement="goodput", profile=profile or shipped_profile())
    found = run(measure_accuracy(spec, trial, report))
    show(json_file, accuracy_json(found), error_table(found.findings))


@grouped_flags
def overload(
    loads: Loads = _SHORT_LOADS,
    sizes: Sizes = _SIZES,
    placement: Annotated[list[str] | None, typer.Option(help="How requests are placed; repeatable.")] = None,
    goodput: Goodput = "",
    json_file: JsonFile = None,
) -> None:
    """Load clusters up to twice their capacity: goodput, what admitted requests attain, how fast others are refused.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.measure.overload import measure_overload, overload_table

    trial = loads.trial(sizes, (0.5, 0.75, 1.0, 1.5, 2.0), goodput)
    policies = placement or ["goodput", "round_robin"]
    found = run(measure_overload(lambda name: loads.spec(placement=name), policies, trial, report))
    show(json_file, found, overload_table(found))


@grouped_flags
def simulator(
    loads: Loads = _LOADS,
    sizes: Sizes = _SIZES,
    placement: Annotated[str, typer.Option(help="How requests are placed.")] = "goodput",
    goodput: Goodput = "",
    json_file: JsonFile = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Also write what was learnt.", callback=writable("--profile")),
    ] = None,
) -> None:
    """Serve a load live, and simulate the same requests with the step times that the live router has learnt.

    Without --goodput, the objectives are multiples of what is seen at light load.
    """
    from pdserve.capacity.replay import measure_simulator, replay_table
    from pdserve.perfmodel.profile import write_profile

    trial = loads.trial(sizes, (0.3, 0.6, 0.9, 1.2), goodput)
    found, learnt = run(measure_simulator(loads.spec(placement=placement), placement, trial, report))
    show(json_file, found, replay_table(found))
    if profile is not None:
        write_profile(profile, learnt)


@grouped_flags
def routers(
    loads: Loads = _FOUR_WORKERS,
    sizes: Sizes = _SIZES,
    num_routers: Annotated[int, typer.Option("--routers", min=2, help="Routers over the same workers.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Compare one router's predictions with those of several, and see whether late ones know what is cached."""
    from pdserve.measure.routers import measure_routers, routers_tables

    trial = loads.trial(sizes, (0.6,))
    found = run(measure_routers(loads.spec(placement="goodput"), num_routers, trial, report))
    show(json_file, {**asdict(found.findings), "late": found.late}, *routers_tables(found))


def profile(
    output: Annotated[Path, typer.Argument(help="File to write, YAML.", callback=writable("OUTPUT"))],
    name: ClusterName = "default",
    bursts: Annotated[int, typer.Option(min=20, help="Bursts of requests to send.")] = 120,
    max_length: Annotated[int, typer.Option(min=2, help="Most tokens of a prompt and its answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the bursts.")] = 0,
) -> None:
    """Sweep the workers of a running cluster with requests of many shapes; write what their steps cost."""
    from pdserve.launch.folder import read_state
    from pdserve.measure import profile as profiles
    from pdserve.perfmodel.profile import write_profile

    source = f"pdserve profile --bursts {bursts} --seed {seed}"
    shapes = profiles.bursts(bursts, max_length, seed)
    write_profile(output, run(profiles.measure_profile(read_state(name), shapes, source, report)))
