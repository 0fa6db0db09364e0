"""The private folder of a local cluster: its lock, its secret, its logs, its ports."""

import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.launch.state import runtime_dir


@contextmanager
def claimed_folder(name: str) -> Iterator[Path]:
    """Own the folder of the cluster `name`, emptied; ConfigError while another process does.

    Logs outlive the cluster; its state and its secret do not.
    """
    folder = runtime_dir(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"--name: a cluster named {name!r} already runs here") from error
        _forget(folder)
        shutil.rmtree(folder / "logs", ignore_errors=True)
        (folder / "logs").mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _forget(folder)
    finally:
        os.close(lock)


def _forget(folder: Path) -> None:
    for name in ("state.json", "secret"):
        (folder / name).unlink(missing_ok=True)


def write_secret(folder: Path) -> Path:
    """Write a random secret that only this user can read; return its file."""
    path = folder / "secret"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def choose_port(host: str, wanted: int | None, *, preferred: int = 0) -> int:
    """Return a port that is free now: `wanted`, which must be, or `preferred` if it is, or any."""
    if wanted is not None:
        port = _bindable(host, wanted)
        if port is None:
            raise ConfigError(f"--router-port: {wanted} on {host} is in use")
        return port
    port = _bindable(host, preferred) or _bindable(host, 0)
    if port is None:
        raise ConfigError(f"--host: nothing can listen on {host}")
    return port


def _bindable(host: str, port: int) -> int | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
