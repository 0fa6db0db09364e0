"""Commands about the autoscaler: its policy, for which no cluster is needed, and its process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.base.errors import ConfigError
from pdserve.cli.flags import config_flags, grouped_flags
from pdserve.cli.options import AsJson, ClusterName, ConfigFile, ProfileFile, WorkloadFlags, WorkloadText
from pdserve.cli.processes import run_process, settings_of
from pdserve.cli.results import HtmlFile, JsonFile, draw, show, writable
from pdserve.settings.autoscaler import AutoscalerConfig

if TYPE_CHECKING:
    from pdserve.autoscaler.journal import Record
    from pdserve.autoscaler.loop import Target
    from pdserve.autoscaler.schema import Policy
    from pdserve.capacity.scaling import Scaled, Scene, Slowdown

PolicyFile = Annotated[Path, typer.Argument(metavar="POLICY", help="The policy, YAML or JSON.")]


def validate(
    policies: Annotated[list[Path], typer.Argument(metavar="POLICY...", help="Policies, YAML or JSON.")],
) -> None:
    """Check policies: what is wrong is named with file, line, field and limit."""
    from pdserve.autoscaler.schema import load
    from pdserve.measure.read_workload import warm_up

    for path in policies:
        warm_up(load(path))  # so that its trace is read too
        typer.echo(f"{path}: valid")


def explain(
    policy: PolicyFile,
    name: Annotated[
        str | None, typer.Option(help="Also what the autoscaler of this cluster decided last, and why.")
    ] = None,
) -> None:
    """Say in plain sentences what a policy does, and when."""
    from pdserve.autoscaler.explain import sentences
    from pdserve.autoscaler.schema import load

    for sentence in sentences(load(policy)):
        typer.echo(sentence)
    if name is not None:
        record = _record(name)
        typer.echo(f"The autoscaler of {name} follows {record.policy}.")
        _show_now(record)


def schema() -> None:
    """Print the JSON Schema of policies, for editors."""
    from pdserve.autoscaler.schema import json_schema

    typer.echo(json_schema(), nl=False)


def crd() -> None:
    """Print the definition of policies as custom resources, for `kubectl apply -f -`."""
    file = files("pdserve.autoscaler") / "static" / "autoscalingpolicies.yaml"
    typer.echo(file.read_text(encoding="utf-8"), nl=False)


@dataclass(frozen=True, slots=True)
class SceneFlags:
    """What a policy is simulated on."""

    profile: ProfileFile = None
    startup: Annotated[
        str | None,
        typer.Option(help="Time from an order to a replica that serves, such as 30s; by default the policy's."),
    ] = None
    rate_scale: Annotated[
        float, typer.Option(min=0.01, max=1000, help="Factor for the number of requests in the same time.")
    ] = 1.0
    window: Annotated[str, typer.Option(metavar="A-B", help="Only the requests of these seconds of the trace.")] = (
        "0-inf"
    )
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="X@A-B", help="Steps take X times as long from second A to B; repeatable."),
    ] = None
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill replicas at the start; by default the least.")] = (
        None
    )
    decode: Annotated[int | None, typer.Option(min=1, help="Decode replicas at the start; by default the least.")] = (
        None
    )

    def scene(self, policy: "Policy", workload: str, sizes: WorkloadFlags) -> "Scene":
        from pdserve.capacity.scaling import scene_of
        from pdserve.perfmodel.profile import read_profile, shipped_profile

        costs = read_profile(self.profile or shipped_profile())
        requests = sizes.read(workload).between(*stretch("--window", self.window))
        requests = requests.multiplied(self.rate_scale, sizes.seed)
        startup_s = None if self.startup is None else _seconds("--startup", self.startup)
        slowed = tuple(slow_stretch(each) for each in self.slow or ())
        return scene_of(policy, requests, costs, (self.prefill, self.decode), startup_s, slowed)


WHOLE_TRACE, SCENE = WorkloadFlags(num_prompts=1_000_000), SceneFlags()


@grouped_flags
def simulate(
    policy: PolicyFile,
    workload: WorkloadText,
    sizes: WorkloadFlags = WHOLE_TRACE,
    on: SceneFlags = SCENE,
    json_file: JsonFile = None,
    html: HtmlFile = None,
    log_file: Annotated[
        Path | None, typer.Option("--log", help="Write the decisions there, a line each.", callback=writable("--log"))
    ] = None,
) -> None:
    """Simulate a policy under a trace: attainment, refusals, replicas and device-hours over time."""
    from pdserve.autoscaler.schema import load
    from pdserve.capacity import scaling

    wanted = load(policy)
    scene = on.scene(wanted, workload, sizes)
    scaled = scaling.follow(scene, wanted)
    show_scaled([scaled], scene, wanted, json_file, html)
    if log_file is not None:
        log_file.write_text("".join(f"{line}\n" for line in scaling.log(scaled)), encoding="utf-8")


def show_scaled(
    runs: "Sequence[Scaled]", scene: "Scene", policy: "Policy", json_file: Path | None, html: Path | None
) -> None:
    """Print runs of one scene side by side, and write the files that are wanted."""
    from pdserve.capacity import scaling

    starts = " and ".join(f"{each_s:g}" for each_s in scene.startup_s.values())
    requests = scene.workload
    title = f"{requests.name}, {len(requests.arrivals)} requests; {scene.objective}; start-up {starts} s"
    results = [scaling.result(each, policy, scene.objective) for each in runs]
    table = show(json_file, results, title, results={"title": title, "runs": results})
    draw(html, "A policy simulated", title, table, scaling.charts(runs, requests, scene.objective))


def slow_stretch(text: str) -> "Slowdown":
    from pdserve.capacity.scaling import Slowdown

    factor, _, when = text.partition("@")
    try:
        times = float(factor)
    except ValueError:
        times = 0.0
    if not 0.01 <= times <= 100:
        raise ConfigError(f"--slow: {text!r} is not X@A-B, with X from 0.01 to 100")
    return Slowdown(times, *stretch("--slow", when))


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
    from pdserve.base.yaml_models import seconds

    try:
        return float(seconds(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r}: {error}") from None


@config_flags(AutoscalerConfig)
def run(config: ConfigFile = None, **flags: object) -> None:
    """Keep each pool of a cluster at the size that a policy asks for.

    The policy's file is read again whenever it changes. A changed policy is followed as a whole, or refused as a whole.
    """
    settings = settings_of(AutoscalerConfig, config, flags)
    from pdserve.autoscaler.server import serve
    from pdserve.measure.read_workload import warm_up

    target = _target(settings.name, settings.routers, settings.secret_file, settings.identity_dir)
    run_process(lambda settings: serve(settings, target, warm_up), settings)


def end(policy: PolicyFile, name: ClusterName = "default") -> None:
    """Let all workers of a cluster of this machine drain and end, for good where no autoscaler starts others."""
    from pdserve.autoscaler.server import end_all

    asyncio.run(end_all(policy, _target(name, (), None, None)))


def status(name: ClusterName = "default", as_json: AsJson = False) -> None:
    """Show what the autoscaler of a cluster of this machine decided lately, and why."""
    record = _record(name)
    if as_json:
        typer.echo(record.model_dump_json(indent=2))
        return
    for entry in record.entries:
        typer.echo(f"{_clock(entry.unix_s)} {entry.text}")
    _show_now(record)


def _record(name: str) -> "Record":
    from pdserve.autoscaler.journal import read_record
    from pdserve.launch.folder import RECORD_FILE, read_state

    return read_record(read_state(name).secret_file.with_name(RECORD_FILE))


def _show_now(record: "Record") -> None:
    for pool in record.pools:
        typer.echo(f"at {_clock(record.unix_s)}: {pool.text}")


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S}"


def _target(name: str, routers: tuple[str, ...], secret_file: Path | None, identity_dir: Path | None) -> "Target":
    from pdserve.autoscaler.loop import Target
    from pdserve.launch.folder import RECORD_FILE, read_state
    from pdserve.net.dns import check_names

    if routers and secret_file is not None:
        check_names(routers, "routers")
        return Target(routers, secret_file, identity_dir)
    if routers or secret_file is not None:
        raise ConfigError("--routers and --secret-file must be given together")
    state = read_state(name)
    record_file = state.secret_file.with_name(RECORD_FILE)
    identity = identity_dir or state.identity_dir
    return Target((state.admin,), state.secret_file, identity, state.launcher, record_file, name, state.elsewhere)
