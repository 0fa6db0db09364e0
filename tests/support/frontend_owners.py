"""Which frontend of a cluster serves a connection: the kernel chooses, and nobody but the kernel knows."""

import psutil
from looking import until

from pdserve.net.rpc import split_address


def frontends(launcher: int) -> list[psutil.Process]:
    """Return the frontends that a process has started."""
    children = psutil.Process(launcher).children(recursive=True)
    return [child for child in children if "frontend" in child.cmdline()]


def own_ports(address: str) -> set[int]:
    """Return this process's ends of its connections to an address."""
    there = int(split_address(address)[1])
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == there}


def owner(launcher: int, port: int) -> int:
    """Return which frontend has accepted a connection, by the port of its other end."""

    def found() -> int | None:
        for process in frontends(launcher):
            if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
                return process.pid
        return None

    return until(found)
