"""Commands about the autoscaler: its policy, for which no cluster is needed, and its process."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.autoscaler.config import AutoscalerConfig
from pdserve.cli.flags import config_flags
from pdserve.cli.options import AsJson, ClusterName, ConfigFile
from pdserve.cli.processes import run_process, settings_of
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.autoscaler.journal import Record
    from pdserve.autoscaler.server import Target

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
    cluster: Annotated[
        str | None, typer.Option(help="Also what the autoscaler of this cluster decided last, and why.")
    ] = None,
) -> None:
    """Say in plain sentences what a policy does, and when."""
    from pdserve.autoscaler.explain import sentences
    from pdserve.autoscaler.schema import load

    for sentence in sentences(load(policy)):
        typer.echo(sentence)
    if cluster is not None:
        record = _record(cluster)
        typer.echo(f"The autoscaler of {cluster} follows {record.policy}.")
        _show_now(record)


def schema() -> None:
    """Print the JSON Schema of policies, for editors."""
    from pdserve.autoscaler.schema import json_schema

    typer.echo(json_schema(), nl=False)


def crd() -> None:
    """Print the definition of policies as custom resources, for `kubectl apply -f -`."""
    import yaml

    from pdserve.autoscaler.definition import definition

    typer.echo(yaml.safe_dump(definition(), sort_keys=False), nl=False)


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
    import asyncio

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
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S}"


def _target(name: str, routers: tuple[str, ...], secret_file: Path | None, identity_dir: Path | None) -> "Target":
    from pdserve.autoscaler.server import Target
    from pdserve.launch.folder import RECORD_FILE, read_state
    from pdserve.names import check_names

    if routers and secret_file is not None:
        check_names(routers, "routers")
        return Target(routers, secret_file, identity_dir)
    if routers or secret_file is not None:
        raise ConfigError("--routers and --secret-file must be given together")
    state = read_state(name)
    record_file = state.secret_file.with_name(RECORD_FILE)
    identity = identity_dir or state.identity_dir
    return Target((state.admin,), state.secret_file, identity, state.launcher, record_file, name, state.elsewhere)
