"""Checks the ports of this machine: a cluster's processes listen as its state says, and the usual ports are free."""

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress

import psutil

from pdserve.doctor.machine import Finding, failed, ok, warning
from pdserve.rpc import join_address, split_address

PORTS = {
    8000: "clients over HTTP",
    50051: "clients",
    50052: "workers and operators",
    50053: "hand-offs",
    50054: "health",
    9464: "metrics",
}

Listeners = Mapping[str, frozenset[str]]  # by process: its host:port


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


def cluster_port_findings(listeners: Listeners, expected: Mapping[str, frozenset[str]]) -> Iterator[Finding]:
    """Check a cluster of this machine. `expected`: where processes must listen at least, by name."""
    for name, addresses in sorted(listeners.items()):
        bound = {at for address in addresses for at in _resolved(address)}
        missing = [address for address in expected.get(name, ()) if bound.isdisjoint(_resolved(address))]
        exposed = sorted(address for address in addresses if not _is_loopback(address))
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


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(split_address(address)[0]).is_loopback


def _process_name(pid: int | None) -> str:
    if pid is None:
        return "a process of somebody else"
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} ({pid})"
    return f"process {pid}"
