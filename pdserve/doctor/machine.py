"""Checks of one machine, or container, and of its ports. Facts about the machine come from `gathering.py`."""

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdserve.base.errors import EXTRAS
from pdserve.net.rpc import is_loopback, join_address, split_address
from pdserve.settings.processor import choose_dtype, cpu_features, cpu_name


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it serves, but not as well as it could, or not for long
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result: what was looked at, what was seen, and what to do where it is not ok."""

    name: str
    level: Level
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Finding:
    return Finding(name, Level.OK, seen)


def warning(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Level.WARNING, seen, remedy)


def failed(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Level.FAILED, seen, remedy)


WORKER_PACKAGES = ("torch", "safetensors", "gguf", "nixl_cu12")  # triton comes with a torch that needs it
SHOWN_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")  # asimd: NEON
RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")  # how names of UCX's RDMA transports begin
ENOUGH_SHM_BYTES = 1 << 28
ENOUGH_MEMORY_BYTES = 1 << 31  # weights of a small model, and kv_cache_memory_bytes
ENOUGH_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device, as UCX names it: mlx5_0:1."""

    name: str
    state: str  # the kernel's: ACTIVE, DOWN, ..
    rate: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts. Limits that are not set are None."""

    versions: Mapping[str, str]  # of packages that are installed, by the name that is imported
    cpu_info: str  # as `pdserve.settings.processor` reads it
    num_cores: int  # that this process may use
    cpu_limit: float | None  # cores of its control group
    memory_bytes: int  # of the machine, or of its control group where that is less
    shm_bytes: int | None  # free in /dev/shm; None: there is none
    locked_bytes: int | None  # that may be locked in memory
    open_files: int | None
    gpus: tuple[str, ...]  # as the driver's nvidia-smi shows them
    torch_gpus: tuple[str, ...]
    torch_problem: str  # why torch cannot use a GPU; empty where it can, or is not installed
    allocator_problem: str  # why workers would refuse torch's memory on a GPU; empty where they would not
    rdma_ports: tuple[RdmaPort, ...]
    transports: tuple[str, ...]  # that UCX offers NIXL here, transport/device
    transports_problem: str
    is_clock_synchronized: bool | None  # None: unknown
    kernels_problem: str  # why there are no compiled kernels; empty where there are, or no torch


def machine_findings(machine: Machine) -> Iterator[Finding]:
    yield _packages(machine.versions)
    yield from _processor(machine)
    yield _memory(machine.memory_bytes)
    yield _shared_memory(machine.shm_bytes)
    yield _open_files(machine.open_files)
    yield _gpu(machine)
    yield from _rdma(machine)
    if machine.transports or machine.transports_problem:
        yield _transports(machine)
    if machine.is_clock_synchronized is False:
        remedy = "run an NTP client such as chrony: certificates and the order of process starts go by the clock"
        yield warning("clock", "the kernel's clock is not synchronized", remedy)


def _packages(versions: Mapping[str, str]) -> Finding:
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    has = {*versions, "nixl_cu12"} if "nixl_cu13" in versions else versions
    missing = [name for name in WORKER_PACKAGES if name not in has]
    if not missing:
        return ok("packages", shown)
    if len(missing) == len(WORKER_PACKAGES):
        return ok("packages", f"{shown}; no worker can run here, which takes pdserve[worker]")
    extra = EXTRAS[missing[0]]
    return warning(
        "packages", f"{shown}; {', '.join(missing)} missing", f"pip install 'pdserve[{extra}]' to run workers"
    )


def _processor(machine: Machine) -> Iterator[Finding]:
    features = cpu_features(machine.cpu_info)
    dtype, because = choose_dtype("auto", "cpu", machine.cpu_info, compiled=not machine.kernels_problem)
    has = " ".join(name for name in SHOWN_FEATURES if name in features) or "no vector extensions that are known"
    yield ok("processor", f"{cpu_name(machine.cpu_info)}: {has}; CPU workers compute in {dtype}: {because}")
    if machine.kernels_problem:
        remedy = "install gcc, and let nobody else write to ~/.cache: plain torch, which is slower, computes instead"
        yield warning("cpu kernels", machine.kernels_problem, remedy)
    limit = machine.cpu_limit
    if limit is not None and limit < machine.num_cores:
        remedy = f"set num_threads: {max(1, int(limit))} for workers: more threads than that wait for each other"
        yield warning("cores", f"{machine.num_cores} cores are seen, and the control group may use {limit:g}", remedy)
    else:
        yield ok("cores", str(machine.num_cores))


def _memory(memory_bytes: int) -> Finding:
    seen = f"{memory_bytes / 2**30:.1f} GiB"
    if memory_bytes < ENOUGH_MEMORY_BYTES:
        return warning("memory", seen, "raise the limit, or lower kv_cache_memory_bytes (1 GiB by default)")
    return ok("memory", seen)


def _shared_memory(shm_bytes: int | None) -> Finding:
    if shm_bytes is None or shm_bytes < ENOUGH_SHM_BYTES:
        seen = "there is none" if shm_bytes is None else f"{shm_bytes / 2**20:.0f} MiB are free"
        remedy = "docker run --shm-size=1g, or on Kubernetes an emptyDir of medium Memory at /dev/shm"
        return warning("/dev/shm", seen, remedy)
    return ok("/dev/shm", f"{shm_bytes / 2**30:.1f} GiB are free")


def _open_files(limit: int | None) -> Finding:
    if limit is not None and limit < ENOUGH_OPEN_FILES:
        remedy = f"ulimit -n {ENOUGH_OPEN_FILES} or more: each client, worker and router takes one"
        return warning("open files", f"at most {limit}", remedy)
    return ok("open files", f"at most {limit}" if limit is not None else "no limit")


def _gpu(machine: Machine) -> Finding:
    if machine.torch_gpus and machine.allocator_problem:
        return failed("gpu", f"{', '.join(machine.torch_gpus)}; {machine.allocator_problem}", "unset it for workers")
    if machine.torch_gpus:
        return ok("gpu", ", ".join(machine.gpus or machine.torch_gpus))
    if not machine.gpus:
        return ok("gpu", "none")
    if "torch" not in machine.versions:
        return ok("gpu", f"{', '.join(machine.gpus)}; torch is not installed")
    seen = f"{', '.join(machine.gpus)}; torch cannot use them: {machine.torch_problem}"
    return failed("gpu", seen, "install a torch that is built for a CUDA version which this driver knows")


def _rdma(machine: Machine) -> Iterator[Finding]:
    if not machine.rdma_ports:
        yield ok("rdma", "no devices: pages travel by TCP between machines")
        return
    shown = ", ".join(f"{port.name} {port.state} {port.rate}" for port in machine.rdma_ports)
    active = [port.name for port in machine.rdma_ports if port.state == "ACTIVE"]
    if not active:
        yield warning("rdma", shown, "no port is active: look at cables, switch and subnet manager")
        return
    yield ok("rdma", f"{shown}; workers use what handoff_rdma_devices names, such as {','.join(active)}")
    if machine.locked_bytes is not None and machine.locked_bytes < machine.memory_bytes // 2:
        seen = f"at most {machine.locked_bytes / 2**20:.0f} MiB"
        yield failed(
            "locked memory", seen, "ulimit -l unlimited, or on Kubernetes the capability IPC_LOCK (rdma.ipcLock)"
        )


def _transports(machine: Machine) -> Finding:
    if machine.transports_problem:
        return failed("ucx", machine.transports_problem, "set handoff_host to an address of this machine")
    shown = " ".join(machine.transports)
    has_rdma = any(name.startswith(RDMA_TRANSPORTS) for name in machine.transports)
    if any(port.state == "ACTIVE" for port in machine.rdma_ports) and not has_rdma:
        remedy = "set handoff_rdma_devices, and see that the container has /dev/infiniband"
        return warning("ucx", f"{shown}: no RDMA, although a port is active", remedy)
    return ok("ucx", shown)


PORTS = {
    8000: "clients over HTTP",
    50051: "clients",
    50052: "workers and operators",
    50053: "hand-offs",
    50054: "health",
    9464: "metrics",
}

Listeners = Mapping[str, frozenset[str]]  # by process: its host:port


def cluster_port_findings(listeners: Listeners, expected: Mapping[str, frozenset[str]]) -> Iterator[Finding]:
    """Check a cluster of this machine. `expected`: where processes must listen at least, by name."""
    for name, addresses in sorted(listeners.items()):
        bound = {at for address in addresses for at in _resolved(address)}
        missing = [address for address in expected.get(name, ()) if bound.isdisjoint(_resolved(address))]
        exposed = sorted(address for address in addresses if not is_loopback(address))
        shown = ", ".join(sorted(addresses)) or "nowhere"
        if missing:
            yield failed(f"ports of {name}", f"{shown}; not {', '.join(sorted(missing))}", "see its log")
        elif exposed:
            remedy = "it was asked to, by a host setting: see that it has TLS, keys or identity, and who reaches it"
            yield warning(f"ports of {name}", f"{', '.join(exposed)} reachable from other machines", remedy)
        else:
            yield ok(f"ports of {name}", shown)


def free_port_findings(taken: Mapping[int, str]) -> Iterator[Finding]:
    """Check that the usual ports are free, where no cluster runs."""
    for port, who in sorted(taken.items()):
        remedy = f"end it, or give the process that is to have it another port (here: {PORTS[port]})"
        yield warning(f"port {port}", f"taken by {who}", remedy)
    if not taken:
        yield ok("ports", f"{', '.join(map(str, sorted(PORTS)))} are taken by nobody else")


def shown_address(ip: str, port: int) -> str:
    """Return host:port, and an IPv4 address as such where a socket of IPv6 has it."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if address.version == 6 else None
    return join_address(str(mapped or address), port)


def _resolved(address: str) -> set[tuple[str, int]]:
    """Return the IP addresses and ports that an address leads to, with one name for each family's wildcard."""
    try:
        found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except socket.gaierror:
        return set()
    ends = [(str(end[0]), int(end[1])) for *_, end in found]
    return {("*" if ipaddress.ip_address(ip).is_unspecified else ip, port) for ip, port in ends}
