"""What a local cluster tells other commands of this user: a file in a private folder, removed at its end."""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.errors import ConfigError

Role = Literal["router", "prefill", "decode"]


class ProcessState(BaseModel):
    """One process of a cluster, as its supervisor sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    pid: int | None  # None between its death and its next start
    incarnation: int
    num_restarts: int
    kv_events_endpoint: str = ""  # where a worker that is attached publishes KV events, if it does
    kv_events_replay_endpoint: str = ""


class ClusterState(BaseModel):
    """Where a cluster is reached and what it consists of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    supervisor_pid: int
    endpoint: str  # host:port of the public gRPC endpoint
    admin: str  # host:port of the router's internal port
    secret_file: Path
    model: str
    ready: bool
    processes: tuple[ProcessState, ...]

    def pid_of(self, name: str) -> int | None:
        """Return the process id of the process called `name`, or None while it is not running."""
        return next((process.pid for process in self.processes if process.name == name), None)


def runtime_dir(name: str) -> Path:
    """Return the folder of the cluster `name`: logs, secret, state. Nothing is created."""
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"name: {name!r} cannot name a folder")
    session = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(session) / "pdserve" if session else Path.home() / ".cache" / "pdserve" / "run"
    return base / name


def state_file(name: str) -> Path:
    """Return where the cluster `name` writes its state."""
    return runtime_dir(name) / "state.json"


def read_state(name: str) -> ClusterState:
    """Return the state of the running cluster `name`; ConfigError if none runs here."""
    path = state_file(name)
    try:
        state = ClusterState.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"no cluster named {name!r} runs here: start one with `pdserve up`") from error
    except ValidationError as error:
        raise ConfigError(f"{path} was written by another version of pdserve") from error
    if not _is_alive(state.supervisor_pid):
        raise ConfigError(f"the cluster named {name!r} has ended without cleaning up: start it again")
    return state


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
