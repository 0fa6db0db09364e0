"""Gathers facts about this machine. Nothing here judges them; what cannot be had is left out."""

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pdserve.base.errors import EXTRAS
from pdserve.doctor.machine import PORTS, Machine, RdmaPort, shown_address
from pdserve.kernels.cpu.build import Missing, built
from pdserve.kvtransfer.backends.ucx import RDMA_DEVICES
from pdserve.settings.processor import allocator_problem, read_cpu_info

PACKAGES = ("pdserve", "grpcio", "protobuf", *EXTRAS)
CHILD_LIMIT_S = 60.0  # torch takes seconds to import
CONTROL_GROUP = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 1 << 60  # version 1 of control groups shows a number near 2^63

_TORCH = """
import json, torch
gpus, problem = [], ""
if torch.version.cuda is None:
    problem = "it is built for CPUs"
else:
    try:
        torch.cuda.init()
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
print(json.dumps([gpus, problem]))
"""
_UCX = """
import sys
from pdserve.base.errors import ConfigError
from pdserve.kvtransfer.backends.nixl import start_agent
from pdserve.kvtransfer.backends.ucx import Network
try:
    start_agent("doctor", Network(sys.argv[1], tuple(sys.argv[2:])), gpu=False)
except ConfigError as error:
    sys.exit(str(error))
"""
_TRANSPORTS = re.compile(r"\|[^|]*\|[^|]*\| \+ (\S+) *\|([^|]*)\|$", re.MULTILINE)  # UCX's table; + : may be used
_DEVICES = re.compile(r"\+ (\S+)")


def gather_machine(handoff_host: str, rdma_devices: Sequence[str]) -> Machine:
    """Look at this machine. UCX is confined as a worker with these settings confines it."""
    versions = _versions()
    gpus, problem = _torch_gpus() if "torch" in versions else ((), "")
    has_nixl = "nixl_cu12" in versions or "nixl_cu13" in versions
    transports, transports_problem = _transports(handoff_host, rdma_devices) if has_nixl else ((), "")
    limit = _memory_limit()
    total_bytes = psutil.virtual_memory().total
    shm, kernels = Path("/dev/shm"), built() if "torch" in versions else None
    return Machine(
        versions=versions,
        cpu_info=read_cpu_info(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_limit=_cpu_limit(),
        memory_bytes=total_bytes if limit is None else min(limit, total_bytes),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        gpus=_driver_gpus(),
        torch_gpus=gpus,
        torch_problem=problem,
        allocator_problem=allocator_problem(),
        rdma_ports=read_rdma_ports(RDMA_DEVICES),
        transports=transports,
        transports_problem=transports_problem,
        is_clock_synchronized=_is_clock_synchronized(),
        kernels_problem=str(kernels) if isinstance(kernels, Missing) else "",
    )


def gather_listeners(pids: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Return where these processes listen, by their name; those that have ended are left out."""
    found: dict[str, frozenset[str]] = {}
    for name, pid in pids.items():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            connections = psutil.Process(pid).net_connections("tcp")
            bound = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
            found[name] = frozenset(shown_address(at.ip, at.port) for at in bound if at)
    return found


def gather_taken() -> dict[int, str]:
    """Return which of the usual ports others have on this machine, and who, as far as can be known.

    What this command runs under, and a container's main process, have their own ports.
    """
    taken: dict[int, str] = {}
    own = {1, *(each.pid for each in psutil.Process().parents())}
    with suppress(psutil.AccessDenied):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port in PORTS and each.pid not in own:
                taken[each.laddr.port] = _process_name(each.pid)
    return taken


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _cpu_limit() -> float | None:
    """Return the cores that the control group may use, by either version of control groups."""
    fields = _read(CONTROL_GROUP / "cpu.max").split()
    if not fields:
        fields = [_read(CONTROL_GROUP / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = (field if field.isdecimal() else "" for field in (*fields, "", "")[:2])
    return int(quota) / int(period) if quota and period else None


def _memory_limit() -> int | None:
    text = _read(CONTROL_GROUP / "memory.max") or _read(CONTROL_GROUP / "memory" / "memory.limit_in_bytes")
    limit = int(text) if text.strip().isdecimal() else NO_LIMIT_BYTES
    return limit if limit < NO_LIMIT_BYTES else None


def read_rdma_ports(devices: Path) -> tuple[RdmaPort, ...]:
    """Return the ports under a folder that looks like /sys/class/infiniband."""
    return tuple(
        RdmaPort(
            f"{port.parent.parent.name}:{port.name}",
            _read(port / "state").strip().rpartition(" ")[2] or "unknown",  # "4: ACTIVE"
            _read(port / "rate").strip(),
        )
        for port in sorted(devices.glob("*/ports/*"))
    )


def _driver_gpus() -> tuple[str, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return tuple(filter(None, _child(query)[0].splitlines()))


def _torch_gpus() -> tuple[tuple[str, ...], str]:
    output, problem = _child([sys.executable, "-c", _TORCH])
    if problem:
        return (), problem
    gpus, why = json.loads(output)
    return tuple(gpus), why


def _transports(host: str, rdma_devices: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Start NIXL's agent in a process of its own, and read in UCX's log what it may use."""
    log, problem = _child([sys.executable, "-c", _UCX, host, *rdma_devices], {"UCX_LOG_LEVEL": "debug"})
    return read_transports(log), problem


def read_transports(log: str) -> tuple[str, ...]:
    """Return the transports that UCX's log lists as enabled, transport/device."""
    rows = _TRANSPORTS.findall(log)
    return tuple(f"{transport}/{device}" for transport, devices in rows for device in _DEVICES.findall(devices))


def _child(command: Sequence[str], env: dict[str, str] | None = None) -> tuple[str, str]:
    """Return what a process prints, and its last words where it fails."""
    try:
        done = subprocess.run(
            command, env=os.environ | (env or {}), capture_output=True, text=True, check=False, timeout=CHILD_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    return done.stdout, last if done.returncode else ""


def _is_clock_synchronized() -> bool | None:
    """Ask the kernel whether an NTP client keeps its clock right."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # a struct timex that changes nothing
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != 5)  # TIME_ERROR


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _process_name(pid: int | None) -> str:
    if pid is None:
        return "a process of somebody else"
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} ({pid})"
    return f"process {pid}"
