"""Commands that become one process of a cluster: a router, a frontend, a worker, or a watcher of pods."""

import json
import os
import resource
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import typer

from pdserve.base.collector import collect_rarely
from pdserve.base.errors import ConfigError, first_of
from pdserve.base.signals import end_on_signals, end_served
from pdserve.cli.flags import config_flags
from pdserve.cli.options import ConfigFile
from pdserve.executor.threads import thread_defaults
from pdserve.observe.logs import configure_logging
from pdserve.router.config import FrontendConfig, RouterConfig
from pdserve.settings.autoscaler import AutoscalerConfig, WatcherConfig
from pdserve.settings.config import WorkerConfig, load_config
from pdserve.settings.process import ProcessConfig
from pdserve.settings.worker_node import WorkerNodeConfig

MAX_OPEN_FILES = 65_536

_Config = TypeVar("_Config", bound=ProcessConfig)


ConfiguredName = Literal["router", "frontend", "worker", "worker-node", "autoscaler", "watch-pods", "cluster"]
CONFIGS: dict[str, type[ProcessConfig]] = {
    "router": RouterConfig,
    "frontend": FrontendConfig,
    "worker": WorkerConfig,
    "worker-node": WorkerNodeConfig,
    "autoscaler": AutoscalerConfig,
    "watch-pods": WatcherConfig,
}


@config_flags(RouterConfig)
def router(config: ConfigFile = None, **flags: object) -> None:
    """Run a router: the public endpoint and the cluster's decisions."""
    settings = settings_of(RouterConfig, config, flags)
    from pdserve.router.server import serve

    collect_rarely()
    run_process(serve, settings)


@config_flags(FrontendConfig)
def frontend(config: ConfigFile = None, **flags: object) -> None:
    """Run a frontend: it serves clients for routers, and keeps their streams when a router is lost."""
    settings = settings_of(FrontendConfig, config, flags)
    from pdserve.router.frontend.process import serve

    collect_rarely()
    run_process(serve, settings)


@config_flags(WorkerConfig)
def worker(config: ConfigFile = None, **flags: object) -> None:
    """Run a worker: prompts become KV pages and a first token, KV pages become tokens, or both, as its role says."""
    settings = settings_of(WorkerConfig, config, flags)
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # read when NIXL is loaded: UCX would take SIGHUP for its debugger
    weights = settings.shared_weights_dir if settings.device != "cuda" else None
    with thread_defaults(os.environ, settings.num_threads, weights, num_ranks=settings.degrees.ranks_per_node) as seat:
        serve = _serving(settings)

    run_process(partial(serve, seat=seat), settings)


def _serving(settings: WorkerConfig) -> Callable[..., Coroutine[Any, Any, None]]:
    """Import what a worker's process is, with or without a router of its own."""
    if settings.dialect_port is None:
        from pdserve.worker import server

        return server.serve
    from pdserve.cli import direct

    return direct.serve


@config_flags(WorkerNodeConfig)
def worker_node(config: ConfigFile = None, **flags: object) -> None:
    """Run the ranks of one machine of a worker that has ranks on several; `pdserve worker` is on another one."""
    settings = settings_of(WorkerNodeConfig, config, flags)
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # for its ranks: as for a worker
    from pdserve.executor.worker_node import serve

    run_process(serve, settings)


@config_flags(WatcherConfig)
def watch_pods(config: ConfigFile = None, **flags: object) -> None:
    """Report to routers which processes of pods have ended, on Kubernetes; an autoscaler there does so, too."""
    settings = settings_of(WatcherConfig, config, flags)
    from pdserve.kubernetes.watcher import serve

    run_process(serve, settings)


def settings_of(cls: type[_Config], file: Path | None, flags: Mapping[str, object]) -> _Config:
    """Read a process's settings, and begin its log, before importing what takes long to load."""
    settings = load_config(cls, file, flags)
    end_on_signals()
    process = next(name for name, each in CONFIGS.items() if each is cls)
    configure_logging(
        settings.worker_id if isinstance(settings, WorkerConfig) else process, settings.log_level, settings.log_format
    )
    return settings


def run_process(serve: Callable[[_Config], Coroutine[Any, Any, int | None]], settings: _Config) -> NoReturn:
    """Serve in this process, then end it with the status returned; ConfigError where it refuses what it is to serve."""
    import uvloop

    _allow_open_files()
    try:
        status = uvloop.run(serve(settings)) or 0
    except ExceptionGroup as group:
        refusal = first_of(group, ConfigError)
        if refusal is None:
            raise
        raise refusal from group
    end_served(status)


def _allow_open_files() -> None:
    """Let this process open as many files as it may have, within reason: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def known_settings() -> set[str]:
    """Return the keys that the file of any process, or of a whole cluster, may have."""
    from pdserve.cli.cluster_file import ClusterFile

    return {name for cls in (*CONFIGS.values(), ClusterFile) for name in cls.model_fields}


def schema(process: Annotated[ConfiguredName, typer.Argument(help="Whose configuration.")]) -> None:
    """Print the JSON Schema of a process's YAML file, or of a whole cluster's."""
    from pdserve.cli.cluster_file import ClusterFile

    model = ClusterFile if process == "cluster" else CONFIGS[process]
    typer.echo(json.dumps(model.model_json_schema(), indent=2))
