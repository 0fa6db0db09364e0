"""Which processes a local cluster consists of, and how each is called."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdserve.base.errors import ConfigError
from pdserve.base.ids import Incarnation
from pdserve.base.roles import Role
from pdserve.net.certificates import Part, public_files
from pdserve.settings.config import WorkerConfig
from pdserve.settings.rank_memory import is_own_unasked

Flags = Mapping[str, object]
ProcessRole = Role | Literal["router", "frontend", "autoscaler"]
WORKER_ROLES = tuple(Role)
WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")  # a log file is called so
MAX_CHILDREN = 1024  # workers with which a cluster begins on this machine; more are a typing error
MAX_FRONTENDS = 64
PUBLISHED = ("kv_events_endpoint", "kv_events_replay_endpoint")
# Settings that the launcher decides for each process.
PER_PROCESS = (
    *("role", "model", "served_model_name", "worker_id", "router_id", "incarnation", "routers", "secret_file"),
    *("identity_dir", "launch_id", "termination_message_file", "name", "http_host", "serve_clients"),
    *("nnodes", "master_port", "join_timeout_s"),  # all of a worker's ranks are on this machine
)
# -P: the working folder is not searched for modules; ours has some with other packages' names.
PDSERVE = (sys.executable, "-P", "-m", "pdserve")


@dataclass(frozen=True, slots=True)
class ServedAt:
    """Where clients are served."""

    endpoint: str  # host:port of gRPC
    http: str  # URL of OpenAI's API; empty: nowhere
    certificates: Path | None = None  # folder that `write_certificates` wrote
    lead: str = ""  # the cluster whose frontends do so


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
    http_port: int | None = None  # None: 8000 if it is free, else any
    internal_port: int | None = None  # of the router, for workers; None: any that is free
    worker_flags: Flags = field(default_factory=dict)  # by field name, for all workers
    router_flags: Flags = field(default_factory=dict)
    frontend_flags: Flags = field(default_factory=dict)  # what is set for the router and holds for frontends too
    role_flags: Mapping[str, Flags] = field(default_factory=dict)  # of the workers of a role; `worker_flags` go first
    autoscaler_flags: Flags = field(default_factory=dict)
    num_mixed: int = 0
    num_frontends: int = 0  # 0: the router serves clients itself
    max_workers: int | None = None  # that there may be at once; None: as many as it begins with
    autoscaling: Path | None = None  # the policy file that an autoscaler follows
    elsewhere: bool = False  # whether the autoscaler starts all workers, on machines of its own
    internal_host: str = "127.0.0.1"  # where the router listens for workers
    tls: bool = False  # whether certificates are made for it
    workers_secret_file: Path | None = None  # the secret on those machines; None: where it is on this one
    served_at: ServedAt | None = None  # by frontends of another cluster; None: by its own, or its router
    others: tuple[str, ...] = ()  # clusters whose clients its frontends serve, too
    num_beside: int = 0  # workers of other clusters on this machine

    @property
    def drain_timeout_s(self) -> float:
        """Return how long running requests have to finish once the cluster is to stop."""
        default = WorkerConfig.model_fields["drain_timeout_s"].default
        of_workers = (self.flags_of(role).get("drain_timeout_s", default) for role in WORKER_ROLES)
        return max(float(str(each)) for each in (self.router_flags.get("drain_timeout_s", 0), *of_workers))

    def flags_of(self, role: str) -> Flags:
        """Return what is given for a worker of a role. If one role's have several GPUs each, all keep pages alike."""
        given = {key: value for key, value in self.worker_flags.items() if value is not None}
        roles = {each: {**self.role_flags.get(each, {}), **given} for each in (*WORKER_ROLES, role)}
        unasked = {"rank_memory": "own"} if any(is_own_unasked(roles[each]) for each in self._roles) else {}
        return {**unasked, **roles[role]}

    @property
    def _roles(self) -> list[Role]:
        """Return which workers there may be."""
        counts = {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode, Role.MIXED: self.num_mixed}
        return [role for role, count in counts.items() if count or self.most_workers > self.num_workers]

    def __post_init__(self) -> None:
        for key in self.worker_flags.keys() - WorkerConfig.model_fields.keys():
            raise ConfigError(f"--{key.replace('_', '-')}: no worker has such a setting")
        self._check_counts()
        for key in PUBLISHED:
            for endpoint in {str(self.flags_of(role).get(key, "")) for role in WORKER_ROLES}:
                if endpoint.startswith("tcp://") and not endpoint.endswith((":*", ":0")):
                    text = f"{endpoint} can be one worker's alone: with * as its port, each takes a free one"
                    raise ConfigError(f"--{key.replace('_', '-')}: {text}")
        if self.tls and self.elsewhere:
            raise ConfigError("--tls: workers on other machines would need certificates there")

    def _check_counts(self) -> None:
        for key, number in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            if number < 0 or (number == 0 and self.num_mixed < 1):
                raise ConfigError(f"--{key}: {number} is refused: at least one worker is needed, or a mixed one")
        if self.num_mixed < 0:
            raise ConfigError(f"--mixed: {self.num_mixed} is refused: none is 0")
        if self.num_workers > MAX_CHILDREN and not self.elsewhere:
            raise ConfigError(f"{self.num_workers} workers are over the limit of {MAX_CHILDREN} on one machine")
        if self.max_workers is not None and self.max_workers < self.num_workers:
            raise ConfigError(f"--max-workers: {self.max_workers} is refused: {self.num_workers} are started")

    @property
    def reads_weights(self) -> bool:
        """Return whether workers on this machine load weights from the model's files."""
        return not self.elsewhere and any(self.flags_of(role).get("load_format") != "dummy" for role in self._roles)

    @property
    def num_workers(self) -> int:
        """Return how many workers it begins with."""
        return self.num_prefill + self.num_decode + self.num_mixed

    @property
    def most_workers(self) -> int:
        """Return how many workers there may be at once."""
        return self.num_workers if self.max_workers is None else self.max_workers


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running."""

    name: str
    role: ProcessRole
    command: tuple[str, ...]

    @property
    def is_worker(self) -> bool:
        return self.role in WORKER_ROLES

    def command_for(self, incarnation: Incarnation) -> tuple[str, ...]:
        """Return the command line of one start."""
        if not self.is_worker:
            return self.command
        return (*self.command, *flag_arguments({"incarnation": incarnation}))


@dataclass(frozen=True, slots=True)
class Wiring:
    """A cluster as it was asked for, and what its processes must agree on beside that."""

    spec: ClusterSpec
    public_port: int
    internal_port: int
    secret_file: Path
    internal_host: str = "127.0.0.1"
    certificates: Path | None = None  # folder that `write_certificates` wrote
    num_threads: int | None = None  # of each worker's engine, unless a flag sets it; None: one for each core
    http_port: int | None = None  # None: HTTP is off
    shared_weights_dir: Path | None = None  # of all workers on this machine

    def identity_dir(self, part: Part) -> Path | None:
        """Return where the certificate of a process is, if it has one."""
        return None if self.certificates is None else self.certificates / part

    @property
    def router(self) -> str:
        """The router's internal port, host:port."""
        return f"{self.internal_host}:{self.internal_port}"

    def worker(self, name: str, role: Role) -> ChildSpec:
        """Return a worker to start. A path at which it publishes KV events gets its name."""
        flags: dict[str, object] = {
            **self._common(Part.WORKER),
            "routers": (self.router,),
            "num_threads": self.num_threads,
            "shared_weights_dir": self.shared_weights_dir,
            **self.spec.flags_of(role),
        }
        for key in PUBLISHED:
            if (endpoint := str(flags.get(key, ""))).startswith("ipc://"):
                flags[key] = f"{endpoint}.{name}"
        return _child(name, role, {**flags, "worker_id": name, "role": role}, "worker")

    def children(self) -> tuple[ChildSpec, ...]:
        """Return the processes with which the cluster begins, the router first."""
        spec = self.spec
        counts = dict(zip(WORKER_ROLES, (spec.num_prefill, spec.num_decode, spec.num_mixed), strict=True))
        names = [(f"{role}-{i}", role) for role, number in counts.items() for i in range(number)]
        children = [] if spec.elsewhere else [self.worker(name, role) for name, role in names]
        if spec.autoscaling is not None:
            flags = {"policy": spec.autoscaling, "name": spec.name, **spec.autoscaler_flags}
            children.append(_child("autoscaler", "autoscaler", flags, "autoscale", "run"))
        return (self._router(), *map(self._frontend, range(spec.num_frontends)), *children)

    def _router(self) -> ChildSpec:
        flags: dict[str, object] = {
            **self._common(Part.ROUTER),
            "internal_host": self.internal_host,
            "internal_port": self.internal_port,
            "drain_timeout_s": self.spec.drain_timeout_s,
        }
        if self.spec.num_frontends or self.spec.served_at:
            flags["serve_clients"] = False
        else:
            flags |= self._endpoints()
        return _child("router", "router", {**flags, **self.spec.router_flags}, "router")

    def _frontend(self, number: int) -> ChildSpec:
        """Return a process that serves clients."""
        name = f"frontend-{number}"
        flags: dict[str, object] = {
            **self._common(Part.FRONTEND),
            **self._endpoints(),
            "routers": (self.router,),
            "frontend_id": name,
            "shares_ports": self.spec.num_frontends > 1,
            "responses_file": self._responses_file,
            "drain_timeout_s": self.spec.drain_timeout_s,
            **self.spec.frontend_flags,
        }
        return _child(name, "frontend", flags, "frontend")

    @property
    def _responses_file(self) -> Path | None:
        """Where frontends keep responses together; None: the one process that serves clients keeps them in memory."""
        return self.secret_file.parent / "responses.sqlite" if self.spec.num_frontends > 1 else None

    def _endpoints(self) -> dict[str, object]:
        flags: dict[str, object] = {
            "host": self.spec.host,
            "port": self.public_port,
            "http_host": self.spec.host,
            "http_port": self.http_port,
        }
        if self.certificates is not None:
            flags["ssl_certfile"], flags["ssl_keyfile"] = public_files(self.certificates)
        return flags

    def _common(self, part: Part) -> Flags:
        return {
            "model": self.spec.model,
            "served_model_name": self.spec.served_model_name,
            "secret_file": self.secret_file,
            "identity_dir": self.identity_dir(part),
        }


def threads_each(num_workers: int, num_cores: int) -> int | None:
    """Return how many threads each engine of one machine computes with; None: one for each core.

    A prefill and a decode worker rarely compute at the same moment under light load. Of more workers, as many run at
    once as keep the cores busy twice over: threads that wait for one another cost more than they bring.
    """
    return None if num_workers <= 2 else max(1, 2 * num_cores // num_workers)


def _child(name: str, role: ProcessRole, flags: Flags, *command: str) -> ChildSpec:
    return ChildSpec(name, role, (*PDSERVE, *command, *flag_arguments(flags)))


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
            case Mapping():
                arguments += (f"--{flag}", json.dumps(value))
            case Sequence():
                for item in value:
                    arguments += (f"--{flag}", str(item))
            case _:
                raise TypeError(f"{name}: a flag cannot carry {type(value).__name__}")
    return tuple(arguments)
