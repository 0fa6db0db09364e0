"""A second machine beside this one: namespaces that share nothing with it but files, and a cable between both.

It has a network, processes, shared memory (/dev/shm and System V's) and a table of hosts of its own. This machine is
the network namespace of a test, as `network_namespace.run_inside` makes it.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from network_namespace import raise_loopback

FIRST, SECOND = "10.77.0.1", "10.77.0.2"  # addresses of this machine and of the other one
_CABLE = "cable"  # the interface, at either end
_NOBODY = "02:00:00:00:00:77"  # no interface has this address
_APART = ("unshare", "--net", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_INTERFACES = "mount -t sysfs none /sys"  # UCX looks for them there, and sees those of whoever has mounted it
_MEMORY = "mount -t tmpfs none /dev/shm"
NEEDED = ("sh", "-ec", f"{_INTERFACES}; {' '.join(_APART)} sh -ec '{_INTERFACES}; {_MEMORY}; ip link add type veth'")


@dataclass(frozen=True, slots=True)
class SecondMachine:
    hosts: Path  # what is /etc/hosts there; to be appended to
    enter: tuple[str, ...]  # the command that runs another one there

    def cut(self) -> None:
        """Let all that is sent over the cable be lost, both ways, and nobody be told."""
        for enter, peer in ((), SECOND), (self.enter, FIRST):
            _ip("neighbour", "replace", peer, "lladdr", _NOBODY, "dev", _CABLE, "nud", "permanent", enter=enter)

    def mend(self) -> None:
        for enter, peer in ((), SECOND), (self.enter, FIRST):
            _ip("neighbour", "delete", peer, "dev", _CABLE, enter=enter)

    def received_bytes(self) -> int:
        """Return how much has gone over the cable to that machine."""
        return psutil.net_io_counters(pernic=True)[_CABLE].bytes_sent


@contextmanager
def second_machine(folder: Path) -> Iterator[SecondMachine]:
    """Run a second machine for the length of the block; all of its processes end with it."""
    raise_loopback()
    subprocess.run(_INTERFACES.split(), check=True)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    own = f"{_INTERFACES}; {_MEMORY}; mount --bind '{hosts}' /etc/hosts; ip link set lo up"
    command = [*_APART, "sh", "-ec", f"{own}; echo up; exec sleep infinity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"up\n"
            (first,) = psutil.Process(holder.pid).children()
            enter = ("nsenter", "--target", str(first.pid), "--net", "--ipc", "--mount", "--pid")
            _ip("link", "add", _CABLE, "type", "veth", "peer", "name", _CABLE, "netns", str(first.pid))
            for at, address in ((), FIRST), (enter, SECOND):
                _ip("address", "add", f"{address}/24", "dev", _CABLE, enter=at)
                _ip("link", "set", _CABLE, "up", enter=at)
            yield SecondMachine(hosts, enter)
        finally:
            holder.kill()


def _ip(*arguments: str, enter: tuple[str, ...] = ()) -> None:
    subprocess.run([*enter, "ip", *arguments], check=True)
