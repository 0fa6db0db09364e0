"""The command that looks for what keeps a machine or a cluster from serving."""

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from pdserve.cli.flags import grouped_flags
from pdserve.cli.options import THIS_MACHINES, AsJson, ConfigFile, Operated
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.doctor.machine import Finding
    from pdserve.doctor.settings import Settings
    from pdserve.launch.admin import AdminClient
    from pdserve.launch.folder import ClusterState


@grouped_flags
def doctor(
    cluster: Operated = THIS_MACHINES,
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option("--model", help="A model to look at, by path or name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look for what keeps this machine, and a cluster, from serving. Exit status 1 if anything cannot work.

    Looks at this machine, at the files that --config (of any process) and --model name, and at the cluster
    that runs here or that --admin names.
    """
    from pdserve.doctor.machine import Level
    from pdserve.doctor.settings import Settings
    from pdserve.yaml_models import read_model

    settings = read_model(Settings, config, {} if model is None else {"model": model})
    findings = list(_findings(settings, cluster))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level is Level.FAILED for finding in findings):
        raise typer.Exit(1)


def _findings(settings: "Settings", cluster: Operated) -> Iterator["Finding"]:
    from pdserve.doctor.gathering import gather_machine
    from pdserve.doctor.machine import machine_findings
    from pdserve.doctor.settings import Settings, settings_findings

    yield from machine_findings(gather_machine(settings.handoff_host, settings.handoff_rdma_devices))
    yield from key_findings(settings.model_extra or ())
    yield from settings_findings(settings, datetime.now(UTC))
    if cluster.identity_dir is not None:
        yield from settings_findings(Settings(identity_dir=cluster.identity_dir), datetime.now(UTC))
    if settings.policy is not None:
        yield from asyncio.run(policy_findings(settings.policy, None))
    if settings.policy_resource is not None:
        yield from asyncio.run(resource_findings(settings.policy_resource))
    yield from cluster_checks(settings, cluster)


async def resource_findings(policy_resource: str) -> list["Finding"]:
    """Check an autoscaler's policy that Kubernetes holds, namespace/name, and the rights that it needs there."""
    from pdserve.autoscaler.server import opened_resource
    from pdserve.doctor.machine import failed

    try:
        async with opened_resource(policy_resource) as resource:
            return await policy_findings(resource.file, policy_resource)
    except ConfigError as error:
        return [failed("policy", str(error), "kubectl get asp, and grant this account `get` of it")]


async def policy_findings(policy: Path, policy_resource: str | None) -> list["Finding"]:
    """Check an autoscaler's policy, and the rights that it needs on Kubernetes."""
    from pdserve.autoscaler.schema import KubernetesActuator, load
    from pdserve.doctor.machine import failed, ok
    from pdserve.doctor.rights import gather_rights

    try:
        actuator = load(policy).actuator
    except ConfigError as error:
        return [failed("policy", str(error), "pdserve autoscale validate FILE")]
    found = [ok("policy", f"{policy_resource or policy}: {actuator.kind}")]
    if isinstance(actuator, KubernetesActuator):
        found += await gather_rights(actuator, policy_resource)
    elif actuator.kind == "publish" and "KUBERNETES_SERVICE_HOST" in os.environ:
        found += await gather_rights(None, policy_resource)
    return found


def key_findings(keys: Iterable[str]) -> Iterator["Finding"]:
    """Check that a process, or a cluster's file, has such settings: none starts with others."""
    from pdserve.cli.cluster_file import ClusterFile
    from pdserve.cli.processes import CONFIGS
    from pdserve.doctor.machine import failed
    from pdserve.yaml_models import did_you_mean

    known = {name for cls in (*CONFIGS.values(), ClusterFile) for name in cls.model_fields}
    for key in keys:
        if key not in known:
            yield failed("config", f"{key}: unknown key{did_you_mean(key, known)}", "mend it: nothing starts with it")


def cluster_checks(settings: "Settings", cluster: Operated) -> Iterator["Finding"]:
    """Check the cluster that flags name, or the one of this machine."""
    from pdserve.doctor.gathering import gather_listeners, gather_taken
    from pdserve.doctor.machine import cluster_port_findings, failed, free_port_findings, ok
    from pdserve.launch.folder import read_state, state_file

    if cluster.admin is None and cluster.secret_file is None and not state_file(cluster.name).exists():
        yield ok("cluster", f"none named {cluster.name!r} runs here")
        yield from free_port_findings(gather_taken())
        return
    try:
        client = cluster.client()
    except ConfigError as error:
        yield failed(
            "cluster", str(error), "start it again, or name what is right with --admin, --secret-file, --identity-dir"
        )
        return
    state = None
    if cluster.admin is None:
        state = read_state(cluster.name)
        pids = {process.name: process.pid for process in state.processes if process.pid is not None}
        expected = {"router": frozenset({state.endpoint, state.admin, urlsplit(state.http).netloc} - {""})}
        yield from cluster_port_findings(gather_listeners(pids), expected)
    yield from asyncio.run(asked(client, settings.model, state))


async def asked(router: "AdminClient", model: str | None, state: "ClusterState | None") -> list["Finding"]:
    """Return what a router says of its cluster. `state`: what its launcher keeps running, where it is here."""
    import grpc

    from pdserve.doctor.cluster import clock_finding, cluster_findings, launched_findings, model_matches
    from pdserve.doctor.machine import failed
    from pdserve.doctor.settings import fingerprint_of

    asked_s = time.time()
    try:
        reply = await router.status_and_clock()
    except (grpc.aio.AioRpcError, ConfigError) as error:
        why = str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        return [failed("router", f"{router.address}: {why}", "see that it runs, and that this machine reaches it")]
    found = [clock_finding(reply.unix_time_ms / 1e3, asked_s, time.time()), *cluster_findings(reply.status)]
    if state is not None:
        found += launched_findings(state, reply.status)
    if model is not None and (fingerprint := fingerprint_of(model)):
        found.append(model_matches(fingerprint, reply.status))
    return found


def _print(findings: Iterable["Finding"]) -> None:
    for finding in findings:
        typer.echo(f"{finding.level:8}{finding.name}: {finding.seen}")
        if finding.remedy:
            typer.echo(f"{'':8}-> {finding.remedy}")
