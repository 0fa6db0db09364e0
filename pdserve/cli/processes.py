"""Commands that become one process of a cluster: a router, a worker, or a watcher of pods."""

import gc
import json
import os
import resource
from collections.abc import Callable, Collection, Coroutine, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field, create_model

from pdserve.autoscaler.config import AutoscalerConfig
from pdserve.cli.cluster import PER_PROCESS
from pdserve.cli.flags import config_flags
from pdserve.cli.options import ConfigFile
from pdserve.config import ProcessConfig, WorkerConfig, load_config
from pdserve.errors import ConfigError, first_of
from pdserve.kubernetes.config import WatcherConfig
from pdserve.router.config import YOUNG_OBJECTS, RouterConfig
from pdserve.signals import end_on_signals
from pdserve.telemetry import configure_logging
from pdserve.worker.threads import thread_defaults
from pdserve.yaml_models import read_model

# Settings of the router that are the cluster's own, by their names there.
OF_CLUSTER = {
    "host": "host",
    "port": "router_port",
    "http_port": "http_port",
    "internal_host": "internal_host",
    "internal_port": "internal_port",
}


def _model(_name: str, **fields: Any) -> type[BaseModel]:  # noqa: ANN401 - pydantic's pairs of type and field
    return create_model(_name, __config__=ConfigDict(extra="forbid"), **fields)


def _section(cls: type[ProcessConfig], without: Collection[str] = PER_PROCESS, **more: Any) -> type[BaseModel]:  # noqa: ANN401
    """Return a model with the settings of a process, none of which is required."""
    fields = {
        name: (field.rebuild_annotation() | None, Field(None, description=field.description))
        for name, field in cls.model_fields.items()
        if name not in without
    }
    return _model(cls.kind, **more, **fields)


_Worker = _section(
    WorkerConfig, replicas=(int | None, Field(None, ge=0, description="Workers with which the cluster begins."))
)
_Workers = _model(
    "workers",
    prefill=(_Worker, Field(_Worker(), description="Workers that compute prompts.")),
    decode=(_Worker, Field(_Worker(), description="Workers that decode.")),
    mixed=(_Worker, Field(_Worker(), description="Workers that do both.")),
)
_Router, _Autoscaler = _section(RouterConfig), _section(AutoscalerConfig, (*PER_PROCESS, "policy_resource"))
ClusterFile = _model(
    "cluster",
    model=(str | None, Field(None, description="A path, or a name from the catalog or the Hugging Face hub.")),
    served_model_name=(str | None, Field(None, min_length=1, description="Name of the model in requests.")),
    name=(str | None, Field(None, description="Name of the cluster on this machine.")),
    max_workers=(int | None, Field(None, ge=1, description="Workers that there may be at once.")),
    tls=(bool | None, Field(None, description="Certificates made for this run, inside and for clients.")),
    router=(_Router, Field(_Router(), description="Settings of the router.")),
    workers=(_Workers, Field(_Workers(), description="Settings of the workers, by their role.")),
    autoscaler=(
        _Autoscaler,
        Field(_Autoscaler(), description="Settings of the autoscaler. One runs if a policy is set."),
    ),
)


def read_cluster(path: Path) -> dict[str, Any]:
    """Return what a file sets, by the names of `ClusterSpec`, `replicas` by role, and `policy`.

    ConfigError names file, line, field and limit of each fault.
    """
    given = read_model(ClusterFile, path).model_dump(exclude_none=True)
    router, workers, autoscaler = (given.pop(key) for key in ("router", "workers", "autoscaler"))
    own = {field: router.pop(key) for key, field in OF_CLUSTER.items() if key in router}
    replicas = {role: settings.pop("replicas") for role, settings in workers.items() if "replicas" in settings}
    flags = {"router_flags": router, "role_flags": workers, "autoscaler_flags": autoscaler}
    return {**given, **own, **flags, "replicas": replicas, "policy": autoscaler.pop("policy", None)}


MAX_OPEN_FILES = 65_536

_Config = TypeVar("_Config", bound=ProcessConfig)


class Process(StrEnum):
    ROUTER = "router"
    WORKER = "worker"
    AUTOSCALER = "autoscaler"
    CLUSTER = "cluster"
    WATCH_PODS = "watch-pods"


CONFIGS: dict[Process, type[ProcessConfig]] = {
    Process.ROUTER: RouterConfig,
    Process.WORKER: WorkerConfig,
    Process.AUTOSCALER: AutoscalerConfig,
    Process.WATCH_PODS: WatcherConfig,
}


@config_flags(RouterConfig)
def router(config: ConfigFile = None, **flags: object) -> None:
    """Run a router: the public endpoint and the cluster's decisions."""
    settings = settings_of(RouterConfig, config, flags)
    from pdserve.router.server import serve

    gc.set_threshold(YOUNG_OBJECTS)
    run_process("router", serve, settings)


@config_flags(WorkerConfig)
def worker(config: ConfigFile = None, **flags: object) -> None:
    """Run a worker: prompts become KV pages and a first token, KV pages become tokens, or both, as its role says."""
    settings = settings_of(WorkerConfig, config, flags)
    configure_logging(settings.worker_id, settings.log_level, settings.log_format)
    weights = settings.shared_weights_dir if settings.device != "cuda" else None
    with thread_defaults(os.environ, settings.num_threads, weights) as seat:
        from pdserve.worker.ending import end_drained

        serve = _serving(settings)

    run_process(settings.worker_id, partial(serve, seat=seat), settings)
    end_drained()


def _serving(settings: WorkerConfig) -> Callable[..., Coroutine[Any, Any, None]]:
    """Import what a worker's process is, with or without a router of its own."""
    if settings.dialect_port is None:
        from pdserve.worker import server

        return server.serve
    from pdserve import direct

    return direct.serve


@config_flags(WatcherConfig)
def watch_pods(config: ConfigFile = None, **flags: object) -> None:
    """Report to routers which processes of pods have ended, on Kubernetes; an autoscaler there does so, too."""
    settings = settings_of(WatcherConfig, config, flags)
    from pdserve.kubernetes.server import serve

    run_process("watch-pods", serve, settings)


def settings_of(cls: type[_Config], file: Path | None, flags: Mapping[str, object]) -> _Config:
    """Read a process's settings before importing what takes long to load."""
    settings = load_config(cls, file, flags)
    end_on_signals()
    return settings


def run_process(name: str, serve: Callable[[_Config], Coroutine[Any, Any, None]], settings: _Config) -> None:
    """Serve in this process until it ends; ConfigError where it refuses what it is to serve with."""
    import uvloop

    configure_logging(name, settings.log_level, settings.log_format)
    _allow_open_files()
    try:
        uvloop.run(serve(settings))
    except ExceptionGroup as group:
        refusal = first_of(group, ConfigError)
        if refusal is None:
            raise
        raise refusal from group


def _allow_open_files() -> None:
    """Let this process open as many files as it may have, within reason: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def schema(process: Annotated[Process, typer.Argument(help="Whose configuration.")]) -> None:
    """Print the JSON Schema of a process's YAML file, or of a whole cluster's."""

    model = ClusterFile if process is Process.CLUSTER else CONFIGS[process]
    typer.echo(json.dumps(model.model_json_schema(), indent=2))
