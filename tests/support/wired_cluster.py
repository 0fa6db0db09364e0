"""Real processes started one by one, with a fault proxy on every control stream between them.

No launcher: nothing is started again, and nobody reports a process's end but the test.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster_states import cluster_state
from fault_proxy import FaultProxy, fault_proxies
from live_cluster import STOP_TIMEOUT_S, LiveCluster, all_ready, greedy

from pdserve.base.clock import new_incarnation
from pdserve.base.files import write_atomically
from pdserve.launch.folder import ClusterState, ProcessState, free_port, write_secret
from pdserve.launch.plan import Flags, ProcessRole, flag_arguments
from pdserve.net.certificates import Part, public_files
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

HOST = "127.0.0.1"
MAX_ROUNDS = 30
TURNS: Flags = {"placement": "least_loaded"}  # idle workers take turns: every pair meets


@dataclass(frozen=True, slots=True)
class Pools:
    """Names of the workers, and internal addresses of routers that the test starts itself."""

    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    more_routers: tuple[str, ...] = ()


@dataclass
class Wiring:
    """What the processes share, and those that have been started."""

    folder: Path
    model: Path
    worker_flags: Flags
    secret_file: Path
    public_port: int
    internal_port: int
    router_flags: Flags = field(default_factory=dict)
    more_routers: tuple[str, ...] = ()
    code: str | None = None  # what processes started from now on run, instead of pdserve as it is
    started: dict[str, tuple[subprocess.Popen[bytes], ProcessState]] = field(default_factory=dict)
    _flags: dict[str, Flags] = field(default_factory=dict)  # of each process, but for its incarnation
    certificates: Path | None = None  # where `write_certificates` has written those of all parts

    def start(self, role: ProcessRole, name: str, flags: Flags) -> subprocess.Popen[bytes]:
        """Start a process with its log in the folder."""
        command, own = (role, {}) if role == "router" else ("worker", {"role": role})
        own |= {} if self.certificates is None else _shown(self.certificates, command)
        arguments = flag_arguments({"model": self.model, "secret_file": self.secret_file, **own, **flags})
        self._flags[name] = flags
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *(("-c", self.code) if self.code else ("-m", "pdserve")), command, *arguments],
                stdout=log,
                stderr=log,
            )
        incarnation = int(str(flags.get("incarnation", 1)))
        self.started[name] = (
            process,
            ProcessState(name=name, role=role, pid=process.pid, incarnation=incarnation, num_restarts=0),
        )
        self._write_state()
        return process

    def start_router(
        self, name: str = "router", public_port: int | None = None, internal_port: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a router; by default the cluster's own."""
        ports = {"port": public_port or self.public_port, "internal_port": internal_port or self.internal_port}
        own = {"router_id": name, "served_model_name": "wired", **TURNS, **ports}
        return self.start("router", name, {**own, **self.router_flags})

    def start_worker(self, role: ProcessRole, name: str, router: str, **flags: object) -> subprocess.Popen[bytes]:
        own = {"worker_id": name, "incarnation": new_incarnation(), "routers": (router, *self.more_routers)}
        own |= {"served_model_name": "wired", "num_threads": 1}
        return self.start(role, name, {**own, **self.worker_flags, **flags})

    def start_again(self, name: str, **flags: object) -> subprocess.Popen[bytes]:
        """Start the next incarnation of a process that has ended. `flags`: what is other than the last time."""
        role = self.started[name][1].role
        fresh = {} if role == "router" else {"incarnation": new_incarnation()}
        return self.start(role, name, {**self._flags[name], **fresh, **flags})

    def state(self) -> ClusterState:
        endpoint, admin = f"{HOST}:{self.public_port}", f"{HOST}:{self.internal_port}"
        processes = tuple(state for _, state in self.started.values())
        identity_dir = self.certificates and self.certificates / Part.OPERATOR
        reached = {"endpoint": endpoint, "admin": admin, "identity_dir": identity_dir}
        return cluster_state(self.secret_file, name="wired", processes=processes, **reached)

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _write_state(self) -> None:
        folder = self.folder / "pdserve" / "wired"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "state.json", self.state().model_dump_json())


def _shown(certificates: Path, command: str) -> Flags:
    """Return with which certificates a process shows itself."""
    own: Flags = {"identity_dir": certificates / command}
    if command == "router":
        own |= dict(zip(("ssl_certfile", "ssl_keyfile"), public_files(certificates), strict=True))
    return own


class WiredCluster(LiveCluster):
    """A cluster whose links and hand-off streams are `proxies`: "link NAME" and "handoff NAME" of each worker.

    A hand-off stream goes through the proxy of the worker that is dialled, which receives pages by it.
    """

    def __init__(self, wiring: Wiring, pools: Pools, proxies: Mapping[str, FaultProxy]) -> None:
        super().__init__(wiring.started["router"][0], wiring.folder)
        self.pools = pools
        self.wiring = wiring
        self.proxies = proxies

    def kill(self, name: str) -> None:
        """End a process at once; it has been reaped when this returns."""
        process, _ = self.wiring.started[name]
        process.kill()
        process.wait()

    def introduce(self) -> None:
        """Have every prefill worker meet every decode worker: each dials on first need."""
        for round_ in range(MAX_ROUNDS):
            if all(self.has_met(prefill, decode) for prefill in self.pools.prefills for decode in self.pools.decodes):
                return
            # Workers of a pool take turns; an odd prompt without a decode worker lets the pools' turns drift.
            for max_tokens in (2, 2, 1):
                self.generate(greedy([3 + round_, 4, 5], max_tokens))
        raise AssertionError("some workers never meet")

    def has_met(self, source: str, target: str) -> bool:
        """Return whether a worker is attached to another one's hand-off service."""
        incarnation = self.wiring.started[source][1].incarnation
        _, _, since_ready = self.wiring.log_of(target).rpartition(" ready: ")
        return f"{source}: attached, incarnation {incarnation:016x}" in since_ready

    def report_gone(self, name: str) -> None:
        """Say, as a launcher does, that a process has ended."""
        _, state = self.wiring.started[name]
        gone = link.ProcessGone(worker_id=name, incarnation=state.incarnation)
        request = admin.ReportProcessGoneRequest(process=gone)
        self.admin.ReportProcessGone(request, metadata=self.proof("ReportProcessGone", 10), timeout=10)


@contextmanager
def wired_cluster(
    folder: Path,
    model: Path,
    pools: Pools,
    worker_flags: Flags,
    router_flags: Flags | None = None,
    own_flags: Mapping[str, Flags] | None = None,
) -> Iterator[WiredCluster]:
    """Run a router and these workers for the length of the block; all must drain and end well.

    `own_flags`: of single workers, by name. All speak TLS if the folder has certificates of all parts.
    """
    workers = (*pools.prefills, *pools.decodes)
    names = [f"{stream} {name}" for stream in ("link", "handoff") for name in workers]
    with ExitStack() as stack:
        proxies = stack.enter_context(fault_proxies(*names))
        ports = free_port(HOST), free_port(HOST)
        secret = found if (found := folder / "secret").exists() else write_secret(folder)
        wiring = Wiring(folder, model, worker_flags, secret, *ports, router_flags or {}, pools.more_routers)
        wiring.certificates = found if (found := folder / "certificates").exists() else None
        stack.callback(kill_all, wiring)
        wiring.start_router()
        for name in workers:
            role: ProcessRole = "decode" if name in pools.decodes else "prefill"
            _start_worker(wiring, role, name, proxies, (own_flags or {}).get(name, {}))
        cluster = WiredCluster(wiring, pools, proxies)
        stack.callback(cluster.close)
        cluster.wait_for(all_ready(len(workers)), 90)
        yield cluster
        end_all(wiring)


def _start_worker(wiring: Wiring, role: ProcessRole, name: str, proxies: Mapping[str, FaultProxy], own: Flags) -> None:
    host = str({**wiring.worker_flags, **own}.get("handoff_host", HOST))
    link, handoff, port = proxies[f"link {name}"], proxies[f"handoff {name}"], free_port(host)
    link.target, handoff.target = (HOST, wiring.internal_port), (host, port)
    wiring.start_worker(role, name, link.address, handoff_port=port, handoff_advertise=handoff.address, **own)


def end_all(wiring: Wiring) -> None:
    """End all in the launcher's order: routers first, so that what runs can finish."""
    routers = [process for process, state in wiring.started.values() if state.role == "router"]
    workers = [process for process, state in wiring.started.values() if state.role != "router"]
    for group in (routers, workers):
        for process in group:
            process.send_signal(signal.SIGTERM)
        for process in group:
            process.wait(STOP_TIMEOUT_S)
    ended = {name: process.returncode for name, (process, _) in wiring.started.items()}
    assert set(ended.values()) <= {0, -signal.SIGKILL}, ended


def kill_all(wiring: Wiring) -> None:
    for process, _ in wiring.started.values():
        if process.poll() is None:
            process.kill()
            process.wait()
