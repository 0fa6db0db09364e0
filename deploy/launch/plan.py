"""Which processes a local cluster consists of, and how each is called."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.config import DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation
from pdserve.launch.state import Role

Flags = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What an operator asks for."""

    model: str  # what the processes open
    served_model_name: str
    num_prefill: int = 1
    num_decode: int = 1
    name: str = "default"
    host: str = "127.0.0.1"
    router_port: int | None = None  # None: 50051 if it is free, else any
    internal_port: int | None = None  # of the router, for workers; None: any that is free
    worker_flags: Flags = field(default_factory=dict)  # by field name, for all workers that have such a field
    router_flags: Flags = field(default_factory=dict)

    @property
    def drain_timeout_s(self) -> float:
        """Return how long running requests have to finish once the cluster is told to stop."""
        given = self.worker_flags.get("drain_timeout_s")
        return float(str(WorkerConfig.model_fields["drain_timeout_s"].default if given is None else given))

    def __post_init__(self) -> None:
        known = PrefillWorkerConfig.model_fields.keys() | DecodeWorkerConfig.model_fields.keys()
        for key in self.worker_flags.keys() - known:
            raise ConfigError(f"--{key.replace('_', '-')}: no worker has such a setting")
        for key, count in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            if count < 1:
                raise ConfigError(f"--{key}: {count} is refused: at least one worker is needed")


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the processes of one cluster must agree on."""

    public_port: int
    internal_port: int
    secret_file: Path
    num_threads: int | None = None  # of each worker's engine, unless the cluster's flags say; None: one for each core


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running."""

    name: str
    role: Role
    command: tuple[str, ...]

    def command_for(self, incarnation: Incarnation) -> tuple[str, ...]:
        """Return the command line of one start."""
        if self.role == "router":
            return self.command
        return (*self.command, *flag_arguments({"incarnation": incarnation}))


def plan(spec: ClusterSpec, wiring: Wiring) -> tuple[ChildSpec, ...]:
    """Return the processes of a cluster, the router first."""
    shared = {
        "model": spec.model,
        "served_model_name": spec.served_model_name,
        "secret_file": wiring.secret_file,
    }
    router = {
        **shared,
        "host": spec.host,
        "port": wiring.public_port,
        "internal_host": "127.0.0.1",
        "internal_port": wiring.internal_port,
        "drain_timeout_s": spec.drain_timeout_s,
        **spec.router_flags,
    }
    chosen = {key: value for key, value in spec.worker_flags.items() if value is not None}
    routers = (f"127.0.0.1:{wiring.internal_port}",)
    worker = {**shared, "routers": routers, "num_threads": wiring.num_threads, **chosen}
    return (
        _child("router", "router", "router", router),
        *(_worker("prefill", i, worker, PrefillWorkerConfig) for i in range(spec.num_prefill)),
        *(_worker("decode", i, worker, DecodeWorkerConfig) for i in range(spec.num_decode)),
    )


def threads_each(num_workers: int, num_cores: int) -> int | None:
    """Return how many threads each engine of one machine computes with; None: one for each core.

    A prefill and a decode worker rarely compute at the same moment under light load. Of more workers, as many run at
    once as keep the cores busy twice over: threads that wait for one another cost more than they bring.
    """
    return None if num_workers <= 2 else max(1, 2 * num_cores // num_workers)


def _worker(role: Role, index: int, flags: Flags, config: type[WorkerConfig]) -> ChildSpec:
    name = f"{role}-{index}"
    known = {key: value for key, value in flags.items() if key in config.model_fields}
    return _child(name, role, f"{role}-worker", {**known, "worker_id": name})


def _child(name: str, role: Role, command: str, flags: Flags) -> ChildSpec:
    # -P: the working folder is not searched for modules; ours has some with other packages' names.
    return ChildSpec(name, role, (sys.executable, "-P", "-m", "pdserve", command, *flag_arguments(flags)))


def flag_arguments(flags: Flags) -> tuple[str, ...]:
    """Return the command-line arguments that set the given fields; None sets nothing."""
    arguments: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case bool():
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            case str() | int() | float() | Path():
                arguments += (f"--{flag}", str(value))
            case Sequence():
                for item in value:
                    arguments += (f"--{flag}", str(item))
            case _:
                raise TypeError(f"{name}: a flag cannot carry {type(value).__name__}")
    return tuple(arguments)
