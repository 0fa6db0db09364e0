"""Which processes a local cluster consists of, and how each is called."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation

Flags = Mapping[str, object]
Role = Literal["router", "prefill", "decode", "mixed"]
PUBLISHED = ("kv_events_endpoint", "kv_events_replay_endpoint")
ANY_PORT = ("*", "0")
MAX_PORT = 65535


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
    worker_flags: Flags = field(default_factory=dict)  # by field name, for all workers
    router_flags: Flags = field(default_factory=dict)
    num_mixed: int = 0

    @property
    def drain_timeout_s(self) -> float:
        """Return how long running requests have to finish once the cluster is to stop."""
        given = self.worker_flags.get("drain_timeout_s")
        return float(str(WorkerConfig.model_fields["drain_timeout_s"].default if given is None else given))

    def __post_init__(self) -> None:
        for key in self.worker_flags.keys() - WorkerConfig.model_fields.keys():
            raise ConfigError(f"--{key.replace('_', '-')}: no worker has such a setting")
        for key, count in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            if count < 0 or (count == 0 and self.num_mixed < 1):
                raise ConfigError(f"--{key}: {count} is refused: at least one worker is needed, or a mixed one")
        if self.num_mixed < 0:
            raise ConfigError(f"--mixed: {self.num_mixed} is refused: none is 0")

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_mixed


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the processes of one cluster must agree on."""

    public_port: int
    internal_port: int
    secret_file: Path
    num_threads: int | None = None  # of each worker's engine, unless a flag sets it; None: one for each core


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
    counts: dict[Role, int] = {"prefill": spec.num_prefill, "decode": spec.num_decode, "mixed": spec.num_mixed}
    names = [(role, f"{role}-{i}") for role, count in counts.items() for i in range(count)]
    published = publishing([name for _, name in names], chosen)
    return (
        _child("router", "router", "router", router),
        *(_worker(role, name, {**worker, **published[name]}) for role, name in names),
    )


def publishing(workers: Sequence[str], flags: Flags) -> dict[str, Flags]:
    """Return where each worker publishes KV events: in place of the given endpoints, endpoints of its own.

    As in vLLM, which counts its data-parallel ranks so, each worker's port is one further than the last one's. A path
    gets the worker's name; where any free port is asked for, all may ask. ConfigError where two would meet.
    """
    given = {key: str(flags[key]) for key in PUBLISHED if key in flags}
    found: dict[str, Flags] = {}
    users: dict[str, str] = {}
    for index, name in enumerate(workers):
        found[name] = {key: _own_endpoint(key, endpoint, index, name) for key, endpoint in given.items()}
        for key, endpoint in found[name].items():
            port = str(endpoint).rpartition(":")[2]
            user = f"{name}'s --{key.replace('_', '-')}"
            if port not in ANY_PORT and users.setdefault(port, user) != user:
                raise ConfigError(f"{user}: {endpoint} is {users[port]} too; each worker needs its own")
    return found


def _own_endpoint(key: str, endpoint: str, index: int, worker: str) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.{worker}"
    host, _, port = endpoint.rpartition(":")
    if port in ANY_PORT:
        return endpoint
    if not port.isdecimal() or int(port) + index > MAX_PORT:
        raise ConfigError(f"--{key.replace('_', '-')}: {endpoint} leaves {worker} no port")
    return f"{host}:{int(port) + index}"


def threads_each(num_workers: int, num_cores: int) -> int | None:
    """Return how many threads each engine of one machine computes with; None: one for each core.

    A prefill and a decode worker rarely compute at the same moment under light load. Of more workers, as many run at
    once as keep the cores busy twice over: threads that wait for one another cost more than they bring.
    """
    return None if num_workers <= 2 else max(1, 2 * num_cores // num_workers)


def _worker(role: Role, name: str, flags: Flags) -> ChildSpec:
    return _child(name, role, f"{role}-worker", {**flags, "worker_id": name})


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
