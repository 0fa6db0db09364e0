"""Confines UCX to the network that carries pages: its TCP listens on addresses of one host, and nowhere else.

By itself UCX listens on every interface, and writes what arrives there to whatever address the sender names. Its
devices are set by environment variables, because NIXL's own parameters carry only one name of a list.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pdserve.base.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.settings.config import WorkerConfig

RDMA_DEVICES = Path("/sys/class/infiniband")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Listener = tuple[_Address, int]


@dataclass(frozen=True, slots=True)
class Network:
    """What may carry pages between workers. Within one machine shared memory may, unless `tcp_only`."""

    host: str = "127.0.0.1"  # an address of this machine or its name; 0.0.0.0 and :: stand for all addresses
    rdma_devices: tuple[str, ...] = ()  # as UCX names them: mlx5_0:1
    tcp_only: bool = False

    @classmethod
    def of(cls, config: "WorkerConfig") -> "Network":
        return cls(config.handoff_host, config.handoff_rdma_devices, tcp_only=config.handoff_transport == "tcp")

    def settings(self, *, gpu: bool = False) -> dict[str, str]:
        """Return the environment variables that confine UCX; ConfigError if it cannot be done.

        An interface of the host is always among the devices: NIXL opens an endpoint to itself, which RDMA alone does
        not give it.
        """
        if self.tcp_only and self.rdma_devices:
            raise ConfigError("handoff_rdma_devices: none can be used where handoff_transport is tcp")
        for device in self.rdma_devices:
            name, _, port = device.partition(":")  # UCX skips unknown devices, and only logs it
            if not (port and (RDMA_DEVICES / name / "ports" / port).is_dir()):
                raise ConfigError(f"handoff_rdma_devices: {device} names no device:port under {RDMA_DEVICES}")
        addresses = self._addresses()
        interfaces = [name for name, owned in _interfaces().items() if not owned.isdisjoint(addresses)]
        if not interfaces:
            raise ConfigError(f"handoff_host: {self.host} is no address of this machine")
        tcp = "tcp,cuda_copy" if gpu else "tcp"
        settings = {
            "UCX_NET_DEVICES": ",".join([*interfaces, *self.rdma_devices]),
            "UCX_TLS": tcp if self.tcp_only else "all",
            "UCX_TCP_AF_PRIO": ",".join(sorted({"inet" if each.version == 4 else "inet6" for each in addresses})),
        }
        for name, value in settings.items():
            inherited = os.environ.get(name, value)
            if inherited != value:
                ours = "handoff_host, handoff_rdma_devices and handoff_transport"
                raise ConfigError(f"environment: {name}={inherited} is not obeyed: {ours} say {value}")
        return settings

    @contextmanager
    def confine(self, *, gpu: bool) -> Iterator[None]:
        """Confine what UCX sets up within the block; ConfigError if it listens elsewhere at the end of the block."""
        settings, addresses = self.settings(gpu=gpu), self._addresses()
        inherited, listening = settings.keys() & os.environ.keys(), listeners()
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings.keys() - inherited:
                del os.environ[name]
        strange = sorted(
            f"{address} port {port}" for address, port in listeners() - listening if address not in addresses
        )
        if strange:
            raise ConfigError(f"handoff_host: {self.host} is asked for, and UCX listens on {', '.join(strange)}")

    def _addresses(self) -> set[_Address]:
        mine = set[_Address]().union(*_interfaces().values())
        found = _resolve(self.host)
        if any(address.is_unspecified for address in found):
            return mine
        # All of 127.0.0.0/8 belongs to one interface, which owns another address than most of them.
        versions = {address.version for address in found if address.is_loopback}
        return found & mine | {address for address in mine if address.is_loopback and address.version in versions}


def listeners() -> set[_Listener]:
    found = psutil.Process().net_connections("tcp")
    return {(_address(each.laddr.ip), each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def _resolve(host: str) -> set[_Address]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"handoff_host: {host}: {error}") from error
    return {_address(str(sockaddr[0])) for *_, sockaddr in found}


def _interfaces() -> dict[str, set[_Address]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: {_address(each.address) for each in owned if each.family in families}
        for name, owned in psutil.net_if_addrs().items()
    }


def _address(text: str) -> _Address:
    return ipaddress.ip_address(text.partition("%")[0])
