"""Nodes of Ray on this machine, on loopback, with a token that only they and this process know."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from looking import until

LOOPBACK = "127.0.0.2"  # Ray takes the usual one for the address of the machine in its network
START_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes; nothing is put there


@dataclass
class RayNodes:
    """A head, and nodes that join and are killed."""

    address: str
    environment: Mapping[str, str]
    folder: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, *flags: str) -> "subprocess.Popen[bytes]":
        """Start a node that lasts until it is killed; it may need a while to join."""
        command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={LOOPBACK}")
        sizes = (f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats")
        with (self.folder / "ray.log").open("ab") as log:
            process = subprocess.Popen(
                (*command, *sizes, *flags), env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    @contextmanager
    def without_control_service(self) -> Iterator[None]:
        """Kill the head's control service (GCS) for the length of the block; then start it again on the same files."""
        head = psutil.Process(self.processes[0].pid)
        (service,) = [each for each in head.children(recursive=True) if each.name() == "gcs_server"]
        command, environment, folder = service.cmdline(), service.environ(), service.cwd()
        head.suspend()  # it would end the node with the service
        service.kill()
        until(lambda: service.status() == psutil.STATUS_ZOMBIE)
        try:
            yield
        finally:
            with (self.folder / "ray.log").open("ab") as log:
                again = subprocess.Popen(
                    command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
                )
            self.processes.append(again)

    def all_processes(self) -> list[psutil.Process]:
        """Return what runs for these nodes: Ray's own processes, and actors with what they started."""
        roots = [psutil.Process(process.pid) for process in self.processes if process.poll() is None]
        return [each for root in roots for each in (root, *root.children(recursive=True))]

    def log(self) -> str:
        return (self.folder / "ray.log").read_text()


@contextmanager
def ray_head(num_cpus: int, is_kept: bool = False) -> Iterator[RayNodes]:
    """Run a head for the length of the block; at its end every process of every node is killed.

    `is_kept`: whether its control service keeps what it knows in files.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: sockets lie below it
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "XDG_RUNTIME_DIR": str(folder),
    }
    if is_kept:
        settings |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "control")}
    port = _free_port()
    nodes = RayNodes(f"{LOOPBACK}:{port}", {**os.environ, **settings}, folder)
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        head = nodes.start(
            *("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"),
            *(f"--ray-client-server-port={_free_port()}", f"--num-cpus={num_cpus}"),
        )
        _await_start(head, nodes)
        yield nodes
    except BaseException as error:
        error.add_note(f"--- log of Ray\n{nodes.log()}")
        raise
    finally:
        for process in nodes.processes:
            end_node(process)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
        shutil.rmtree(folder, ignore_errors=True)


def end_node(process: "subprocess.Popen[bytes]") -> None:
    """Kill a node with all that it started."""
    with suppress(psutil.NoSuchProcess):
        for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _await_start(head: "subprocess.Popen[bytes]", nodes: RayNodes) -> None:
    """Return once the head serves; whoever calls it before may wait for minutes."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while "Ray runtime started" not in nodes.log():
        assert head.poll() is None, "the head has ended"
        assert time.monotonic() < deadline_s, "the head does not start"
        with suppress(subprocess.TimeoutExpired):
            head.wait(0.1)
