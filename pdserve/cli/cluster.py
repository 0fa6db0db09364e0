"""Commands about a whole cluster on this machine: start it, look at it, show it."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.base.errors import CommandError, ConfigError
from pdserve.base.roles import Role
from pdserve.cli.flags import config_flags, grouped_flags
from pdserve.cli.options import DEFAULT_MODEL, THIS_MACHINES, AsJson, CaFile, Endpoint, OperatorFlags, RouterFlags
from pdserve.launch.plan import MAX_FRONTENDS, PER_PROCESS
from pdserve.router.config import EndpointConfig, ModelSettings, RouterConfig
from pdserve.settings.config import MAX_RANKS, WorkerConfig

if TYPE_CHECKING:
    from pdserve.autoscaler.actuator import PoolSizes
    from pdserve.launch.plan import ClusterSpec


class Platform(StrEnum):
    PROCESSES = "processes"
    RAY = "ray"


def check_platform(on: Platform, sizes: "PoolSizes", num_mixed: int, address: str | None) -> None:
    """Raise ConfigError where flags and policy disagree about what runs the workers."""
    if sizes.elsewhere != (on is Platform.RAY):
        raise ConfigError(f"--on: {on} is not the policy's actuator.kind")
    if on is Platform.RAY and num_mixed:
        raise ConfigError("--mixed: goes with --on processes only")
    if on is not Platform.RAY and address is not None:
        raise ConfigError("--address: goes with --on ray only")


def policy_on_ray(
    policy: Path | None,
    name: str,
    prefill: int | None,
    decode: int | None,
    address: str | None,
    flags: Mapping[str, object],
) -> Path:
    """Return the policy to follow: the one given, or one that is written into the cluster's folder and keeps sizes.

    ConfigError where a flag would say what the given policy says.
    """
    if policy is None:
        return _fixed_policy(name, prefill or 1, decode or 1, address, flags)
    for flag, value in (("prefill", prefill), ("decode", decode), ("address", address)):
        if value is not None:
            raise ConfigError(f"--{flag}: goes with no --policy on Ray: the policy says it")
    return policy


def _fixed_policy(
    name: str, num_prefill: int, num_decode: int, address: str | None, flags: Mapping[str, object]
) -> Path:
    from pdserve.base.files import write_atomically
    from pdserve.launch.folder import runtime_dir

    device = {"GPU": 1} if flags.get("device") == "cuda" else {"CPU": flags.get("num_threads") or 1}
    sizes = {"prefill": num_prefill, "decode": num_decode}
    policy = {
        "apiVersion": "pdserve/v1alpha1",
        "kind": "AutoscalingPolicy",
        "objectives": {"ttftMs": 60_000, "tpotMs": 60_000},
        "budget": {"maxDevices": num_prefill + num_decode},
        "interval": {"react": "1s"},
        "pools": {pool: {"minReplicas": size, "maxReplicas": size} for pool, size in sizes.items()},
        "roleSwitch": {"enabled": False},
        "actuator": {"kind": "ray", "address": address, "resourcesPerDevice": device},
    }
    path = runtime_dir(name) / "fixed-policy.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(policy, indent=2) + "\n")
    return path


ADDRESSES = (
    *("handoff_host", "handoff_port", "handoff_advertise"),
    *("host", "port", "http_port", "internal_host", "internal_port", "metrics_port", "health_port"),
)

# Settings of the router that hold for frontends too; its ports are its own.
_OF_FRONTENDS = EndpointConfig.model_fields.keys() - {"metrics_port", "health_port"}
_MAX_PORT = 65535

ClusterArgument = Annotated[
    str, typer.Argument(metavar="[NAME]", envvar="PDSERVE_CLUSTER", help="Which of this machine's clusters.")
]


@dataclass(frozen=True, slots=True)
class ReplicaFlags:
    """Workers with which a cluster begins, by role."""

    prefill: Annotated[int | None, typer.Option(help="Prefill workers; by default 1, or the policy's least.")] = None
    decode: Annotated[int | None, typer.Option(help="Decode workers; by default 1, or the policy's least.")] = None
    mixed: Annotated[int | None, typer.Option(help="Workers that compute prompts and decode.")] = None


@dataclass(frozen=True, slots=True)
class RankFlags:
    """Ranks and pipeline stages of each worker, by role."""

    prefill_tp: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Ranks of a prefill worker.")] = None
    decode_tp: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Ranks of a decode worker.")] = None
    prefill_pp: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Stages of a prefill worker.")] = None
    decode_pp: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Stages of a decode worker.")] = None

    def over(
        self, given: Mapping[str, Mapping[str, object]], flags: Mapping[str, object], on: Platform
    ) -> dict[str, dict[str, object]]:
        """Return settings of workers, by role, with these in the place of what a file says. flags: of all workers."""
        found: dict[str, dict[str, object]] = {role: dict(given.get(role, {})) for role in Role}
        for flag, size in _given(asdict(self)).items():
            role, short = flag.split("_")
            name = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}[short]
            if on is Platform.RAY or name in flags:
                raise ConfigError(f"--{role}-{short}: goes neither with --on ray nor with --{name.replace('_', '-')}")
            found[role][name] = size
        return found


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Settings of a new cluster, by the names of `ClusterSpec`."""

    policy: Annotated[Path | None, typer.Option(help="Autoscaling policy to follow, see `pdserve autoscale run`.")] = (
        None
    )
    max_workers: Annotated[
        int | None,
        typer.Option(
            help="Workers that there may be at once; by default those it begins with, or the policy's budget."
        ),
    ] = None
    num_frontends: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_FRONTENDS,
            help="Processes of their own that serve clients: they tokenize and write answers. When the router is "
            "lost, their connections and streams go on. With 0, the default, the router serves clients itself.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(envvar="PDSERVE_CLUSTER", help="What to call it; by default default.")] = (
        None
    )
    internal_host: Annotated[
        str | None,
        typer.Option(help="Address of this machine at which workers elsewhere reach the router; by default loopback."),
    ] = None
    workers_secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            help="The cluster's secret, on this machine and on each node of Ray; by default a random one of this "
            "machine.",
        ),
    ] = None
    host: Annotated[str | None, typer.Option(help="Where the public endpoints listen; by default on loopback.")] = None
    router_port: Annotated[
        int | None,
        typer.Option(min=0, max=_MAX_PORT, help="Port of the public endpoint; by default 50051 if free, else any."),
    ] = None
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=_MAX_PORT, help="Port of OpenAI's API over HTTP; by default 8000 if free, else any."),
    ] = None
    tls: Annotated[
        bool | None,
        typer.Option("--tls", help="Certificates of an authority made for this run, inside and for clients."),
    ] = None


_NO_REPLICAS, _NO_RANKS, _NO_SETTINGS = ReplicaFlags(), RankFlags(), ClusterFlags()


@config_flags(WorkerConfig, RouterConfig, without=(*set(PER_PROCESS) - {"served_model_name"}, *ADDRESSES))
@grouped_flags
def up(
    model: Annotated[
        str | None,
        typer.Argument(help=f"A path, or a name from the catalog or the Hugging Face hub; by default {DEFAULT_MODEL}."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with router, workers by role, and autoscaler, of a model or of several."),
    ] = None,
    least: ReplicaFlags = _NO_REPLICAS,
    ranks: RankFlags = _NO_RANKS,
    own: ClusterFlags = _NO_SETTINGS,
    on: Annotated[
        Platform, typer.Option(help="What runs the workers: processes of this machine, or actors of Ray.")
    ] = Platform.PROCESSES,
    address: Annotated[
        str | None, typer.Option(help="Ray's address; by default Ray looks for it. Goes with --on ray.")
    ] = None,
    **flags: object,
) -> None:
    """Start a router and workers on this machine and keep them running. Ctrl-C drains, a second one kills.

    A worker that ends, drained or not, is started again, with the role that it has here.

    With --policy, an autoscaler starts and ends workers, and changes their roles, as the policy says. With --on ray,
    only the router and it run here; workers are owned by actors of Ray, which outlive a second Ctrl-C.

    Each flag goes to every process that has it, and overrides the file of --config. A path at which
    workers publish KV events gets each worker's name, and a port there has to be *: each takes a free one.
    """
    from pdserve.cli.cluster_file import check_flags_of_several, read_clusters
    from pdserve.cli.running import Terminal, serve_until_signal
    from pdserve.launch.several import joined

    given = _given(flags)
    named = {"model": model, "served_model_name": given.pop("served_model_name", None)}
    above = _given({**named, **asdict(own)})
    models = [{}] if config is None else read_clusters(config)
    if len(models) > 1:
        check_flags_of_several({**above, **_given(asdict(least)), **given}, is_on_ray=on is Platform.RAY)
    specs = []
    for settings in [each | above for each in models]:
        settings["role_flags"] = ranks.over(settings.get("role_flags", {}), given, on)
        settings["replicas"] = replicas = settings.get("replicas", {}) | _given(asdict(least))
        if on is Platform.RAY:
            wanted = replicas.get("prefill"), replicas.get("decode")
            cluster = settings.get("name", "default")
            settings["policy"] = policy_on_ray(settings.get("policy"), cluster, *wanted, address, given)
        specs.append(_spec(settings, given, on, address))
    asyncio.run(serve_until_signal(joined(specs, ModelSettings.model_fields), Terminal()))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _spec(settings: dict[str, Any], flags: Mapping[str, object], on: Platform, address: str | None) -> "ClusterSpec":
    """Return the cluster that settings, of a file and of flags for all processes, ask for."""
    from pdserve.autoscaler.actuator import PoolSizes, sizes_at_start
    from pdserve.cli.models import fetched, model_name
    from pdserve.launch.plan import ClusterSpec

    model, policy = settings.pop("model", DEFAULT_MODEL), settings.pop("policy", None)
    replicas = settings.pop("replicas")
    num_mixed = replicas.pop("mixed", 0)
    sizes = replace(PoolSizes(1, 1, None) if policy is None else sizes_at_start(policy), **replicas)
    check_platform(on, sizes, num_mixed, address)
    secret_file = settings.pop("workers_secret_file", None)
    of_router = {key: value for key, value in flags.items() if key in RouterConfig.model_fields}
    router_flags = settings.pop("router_flags", {}) | of_router
    if sizes.may_be_empty:
        router_flags.setdefault("scale_to_zero", True)
    return ClusterSpec(
        **{"served_model_name": model_name(model), "max_workers": sizes.max_workers, **settings},
        model=str(fetched(model)),
        num_prefill=sizes.prefill,
        num_decode=sizes.decode,
        num_mixed=num_mixed,
        autoscaling=None if policy is None else policy.absolute(),
        elsewhere=sizes.elsewhere,
        workers_secret_file=None if secret_file is None else secret_file.absolute(),
        worker_flags={key: value for key, value in flags.items() if key in WorkerConfig.model_fields},
        router_flags=router_flags,
        frontend_flags={key: value for key, value in router_flags.items() if key in _OF_FRONTENDS},
    )


@grouped_flags
def status(
    cluster: OperatorFlags = THIS_MACHINES,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the changes until Ctrl-C.")] = False,
    as_json: AsJson = False,
    endpoint: Endpoint = None,
    ca_file: CaFile = None,
) -> None:
    """Show the workers, their pages and what they are doing.

    With --endpoint, what a router shows everybody: whether it serves, and its models. Its workers are shown to those
    who know the cluster's secret: --admin and --secret-file.
    """
    from pdserve.cli.status import show_status

    if endpoint is not None:
        from pdserve.cli.status import show_public_status

        if watch or cluster.admin is not None or cluster.secret_file is not None:
            raise ConfigError("--endpoint: goes with neither --watch nor --admin nor --secret-file")
        asyncio.run(show_public_status(*RouterFlags(endpoint, ca_file).router(), as_json=as_json))
        return
    asyncio.run(show_status(cluster.client(), watch=watch, as_json=as_json))


def down(name: ClusterArgument = "default") -> None:
    """Let a cluster of this machine drain and end, as Ctrl-C does where it runs; wait for its end.

    Fails unless all of it drained in time. Ctrl-C leaves it draining; a second `pdserve down` ends it at once.
    """
    from pdserve.launch.folder import drained_file, read_state, wait_for_end

    state = read_state(name)
    if state.lead:
        raise ConfigError(f"{name} ends with the models at its address: `pdserve down {state.lead}` ends all")
    with suppress(ProcessLookupError):
        os.kill(state.supervisor_pid, signal.SIGTERM)
    wait_for_end(name)
    if not all(drained_file(each).exists() for each in (name, *state.others)):
        raise CommandError(f"{name} has ended, and not all of it drained: `pdserve logs {name}` shows why")


def logs(
    name: ClusterArgument = "default",
    process: Annotated[
        str, typer.Argument(metavar="[PROCESS]", help="One of its processes; by default all.", show_default=False)
    ] = "*",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show what is appended until Ctrl-C.")] = False,
) -> None:
    """Show what the processes of a cluster of this machine logged. Logs outlive their cluster until its next start."""
    from pdserve.launch.folder import runtime_dir

    files = sorted((runtime_dir(name) / "logs").glob(f"{process}.log"))
    if not files:
        raise ConfigError(f"{name}: no logs of {'any process' if process == '*' else process} are here")
    os.execvp("tail", ["tail", "-n", "+1", *(["-F"] if follow else []), *map(str, files)])


def demo(
    model: Annotated[
        str, typer.Option(help="A path, or a name from the catalog or the Hugging Face hub.")
    ] = DEFAULT_MODEL,
    question: Annotated[str, typer.Option(help="What to ask.")] = "Name the capital of France.",
    expect: Annotated[str, typer.Option(help="Text that the answer must contain.")] = "Paris",
) -> None:
    """Start a cluster, ask it one question, stop it. Fails unless the answer contains what is expected."""
    from pdserve.cli.models import cluster_of
    from pdserve.cli.running import Terminal, run_demo

    asyncio.run(run_demo(cluster_of(model, "demo"), Terminal(), question, expect))
