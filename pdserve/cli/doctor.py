"""The command that looks for what keeps a machine or a cluster from serving."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import THIS_MACHINES, AsJson, ConfigFile, OperatorFlags

if TYPE_CHECKING:
    from pdserve.doctor.machine import Finding
    from pdserve.doctor.settings import Settings


@grouped_flags
def doctor(
    cluster: OperatorFlags = THIS_MACHINES,
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option("--model", help="A model to look at, by path or name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look for what keeps this machine, and a cluster, from serving. Exit status 1 if anything cannot work.

    Looks at this machine, at the files that --config (of any process) and --model name, and at the cluster
    that runs here or that --admin names.
    """
    from pdserve.base.yaml_models import read_model
    from pdserve.doctor.machine import Level
    from pdserve.doctor.settings import Settings

    settings = read_model(Settings, config, {} if model is None else {"model": model})
    findings = list(_findings(settings, cluster))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.level:8}{finding.name}: {finding.seen}")
            if finding.remedy:
                typer.echo(f"{'':8}-> {finding.remedy}")
    if any(finding.level is Level.FAILED for finding in findings):
        raise typer.Exit(1)


def _findings(settings: "Settings", cluster: OperatorFlags) -> Iterator["Finding"]:
    from pdserve.cli.processes import known_settings
    from pdserve.doctor import settings as checks
    from pdserve.doctor.cluster import cluster_checks
    from pdserve.doctor.gathering import gather_machine
    from pdserve.doctor.machine import machine_findings

    yield from machine_findings(gather_machine(settings.handoff_host, settings.handoff_rdma_devices))
    yield from checks.key_findings(settings.model_extra or (), known_settings())
    yield from checks.settings_findings(settings, datetime.now(UTC))
    if cluster.identity_dir is not None:
        yield from checks.settings_findings(checks.Settings(identity_dir=cluster.identity_dir), datetime.now(UTC))
    if settings.policy is not None:
        yield from asyncio.run(checks.policy_findings(settings.policy))
    if settings.policy_resource is not None:
        yield from asyncio.run(checks.resource_findings(settings.policy_resource))
    is_of_this_machine = cluster.admin is None and cluster.secret_file is None
    yield from cluster_checks(cluster.name if is_of_this_machine else None, cluster.client, settings.model)
