"""Which frontend of a router serves a connection: the kernel chooses, and nobody but the kernel knows."""

import psutil
from looking import until

from pdserve.rpc import split_address


def frontends(router: int) -> list[psutil.Process]:
    """Return the frontends of a router's process."""
    children = psutil.Process(router).children()
    return [child for child in children if "pdserve.router.frontend.process" in child.cmdline()]


def own_ports(address: str) -> set[int]:
    """Return this process's ends of its connections to an address."""
    there = int(split_address(address)[1])
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == there}


def owner(router: int, port: int) -> int:
    """Return which frontend has accepted a connection, by the port of its other end."""

    def found() -> int | None:
        for process in frontends(router):
            if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
                return process.pid
        return None

    return until(found)
