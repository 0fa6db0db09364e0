"""The private folder of a local cluster: lock, secret, logs, the state that other commands read; and its ports."""

import fcntl
import os
import random
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from pdserve.base.errors import CommandError, ConfigError
from pdserve.base.files import home_folder, why_unusable
from pdserve.launch.plan import ProcessRole, Wiring
from pdserve.net.operator_client import AdminClient
from pdserve.net.rpc import bare_host, bind_error, join_address, read_secret, why_not_bound

CERTIFICATES = "certificates"
RECORD_FILE = "autoscaler.json"  # what the cluster's autoscaler decided lately
_QUIET_PORTS = range(20_000, 32_768)  # below those that Linux, macOS and Windows take for connections


class ProcessState(BaseModel, frozen=True, extra="forbid"):
    """One process of a cluster, as its supervisor sees it."""

    name: str
    role: ProcessRole
    pid: int | None  # None between its death and its next start
    incarnation: int
    num_restarts: int
    leaving: bool = False  # whether it was asked to end for good
    kv_events_endpoint: str = ""  # where a worker that is attached publishes KV events, if it does
    kv_events_replay_endpoint: str = ""
    metrics_address: str = ""  # host:port where it shows its metrics, once the router is there or it is attached


class ClusterState(BaseModel, frozen=True, extra="forbid"):
    """Where a cluster is reached and what it consists of."""

    name: str
    supervisor_pid: int
    endpoint: str  # host:port of the public gRPC endpoint
    admin: str  # host:port of the router's internal port
    secret_file: Path
    identity_dir: Path | None = None  # an operator's, where the cluster asks for certificates
    ca_file: Path | None = None  # authority that clients of the public endpoint trust, where it is TLS
    model: str
    ready: bool
    processes: tuple[ProcessState, ...]
    elsewhere: Wiring | None = None  # of the workers, where they are started on other machines
    launcher: str = ""  # host:port at which workers are started and stopped; empty: nowhere
    http: str = ""  # URL of OpenAI's API; empty: it is not served
    others: tuple[str, ...] = ()  # clusters of other models, which start and end with this one
    lead: str = ""  # the cluster with which this one starts and ends; empty: it is no other's

    def operator(self, identity_dir: Path | None = None) -> AdminClient:
        """Return a connection to the router's internal port, with another operator's identity if one is given."""
        return AdminClient(self.admin, self.secret_file, identity_dir or self.identity_dir)

    def pid_of(self, name: str) -> int | None:
        """Return the process id of the process called `name`, or None while it is not running."""
        return next((process.pid for process in self.processes if process.name == name), None)


def runtime_dir(name: str) -> Path:
    """Return the folder of the cluster `name`: logs, secret, state. Nothing is created."""
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"name: {name!r} cannot name a folder")
    session = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(session) / "pdserve" if session else home_folder("XDG_RUNTIME_DIR") / ".cache" / "pdserve" / "run"
    return base / name


def state_file(name: str) -> Path:
    """Return where the cluster `name` writes its state."""
    return runtime_dir(name) / "state.json"


def drained_file(name: str) -> Path:
    """Return the file that exists from the moment the cluster `name` has drained until its next start."""
    return runtime_dir(name) / "drained"


def read_state(name: str) -> ClusterState:
    """Return the state of the running cluster `name`; ConfigError if none runs here."""
    path = state_file(name)
    try:
        state = ClusterState.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"no cluster named {name!r} runs here: start one with `pdserve up`") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{path} was written by another version of pdserve") from error
    if not (psutil.pid_exists(state.supervisor_pid) and _is_owned(path.parent)):
        raise ConfigError(f"the cluster named {name!r} has ended without cleaning up: start it again")
    return state


def _is_owned(folder: Path) -> bool:
    """Return whether a launcher owns the folder. Its process id may be another process's by now."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return True
    return False


@contextmanager
def claimed_folder(name: str) -> Iterator[Path]:
    """Own the folder of the cluster `name`, emptied; ConfigError while another process does.

    Logs, and that it drained, outlive the cluster; its state and its secret do not.
    """
    folder = runtime_dir(name)
    with _making(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--name: a cluster named {name!r} already runs here") from error
        _forget(folder)
        drained_file(name).unlink(missing_ok=True)
        shutil.rmtree(folder / "logs", ignore_errors=True)
        with _making(folder):
            (folder / "logs").mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _forget(folder)
    finally:
        os.close(lock)


def wait_for_end(name: str) -> None:
    """Return once nobody owns the folder of the cluster `name`."""
    with (runtime_dir(name) / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _forget(folder: Path) -> None:
    for name in ("state.json", "metrics.json", "secret", RECORD_FILE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / CERTIFICATES, ignore_errors=True)


def write_secret(folder: Path, given: Path | None = None) -> Path:
    """Write a secret that only this user can read, a random one unless a file has one; return its file."""
    secret = secrets.token_hex(32).encode() if given is None else read_secret(given)
    path = folder / "secret"
    with _making(path), os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secret)
    return path


@contextmanager
def _making(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot make {why_unusable(error, path, 'XDG_RUNTIME_DIR')}") from error


@contextmanager
def claimed_port(host: str, wanted: int | None, preferred: int, flag: str = "--router-port") -> Iterator[int]:
    """Yield a port for clients: `wanted`, which must be free, or `preferred` if it is, or any.

    For the length of the block no other cluster on this machine is given it: nobody listens there until the router
    does, seconds later.
    """
    with ExitStack() as claims:
        port = preferred if wanted is None else wanted
        is_ours = _claim(host, port, claims)
        if wanted is not None and not is_ours:
            raise ConfigError(f"{flag}: another cluster on this machine has {wanted} on {host}; take another port")
        if wanted is not None and (error := bind_error(host, wanted)) is not None:
            why = why_not_bound(host, wanted, error)
            raise ConfigError(f"{flag}: cannot listen on {join_address(host, wanted)}: {why}")
        yield (_bindable(host, port) if is_ours and port else None) or free_port(host)


def free_port(host: str, flag: str = "--host") -> int:
    """Return a port that is free now. ConfigError names the flag of a host where none is.

    It is outside the range from which the system gives ports to connections: until somebody listens, they could get it.
    """
    port = next((port for port in random.sample(_QUIET_PORTS, 16) if _bindable(host, port)), None)
    if port is None:
        raise ConfigError(f"{flag}: cannot listen on {host}: {why_not_bound(host, 0)}")
    return port


def _claim(host: str, port: int, claims: ExitStack) -> bool:
    """Reserve a port until `claims` is closed; False if another cluster has it. Port 0 is never reserved."""
    if port == 0 or sys.platform != "linux":
        return True
    claim = claims.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(f"\0pdserve {host}:{port}")  # a name that is no file, and ends with this process
    except OSError:
        return False
    return True


def _bindable(host: str, port: int) -> int | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bare_host(host), port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
