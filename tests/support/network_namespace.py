"""A network of a test's own, in which packets can be dropped and connections reset."""

import fcntl
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
TIMEOUT_S = 280  # less than a test may take that runs others inside
DROP, RESET = "drop", "reject with tcp reset"


def run_inside(path: Path, needed: Sequence[str] = ("nft", "list", "ruleset")) -> None:
    """Run the tests of a file in a network namespace of their own; skip where this machine has no means for it.

    needed: a command that has to succeed there. Mounts are the tests' own, too.
    """
    enter = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    try:
        found = subprocess.run([*enter, *needed], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare (Debian's package util-linux)")
    if found.returncode:
        pytest.skip(f"needs namespaces for unprivileged users, and in them {' '.join(needed)}: {found.stderr}")
    command = [*enter, Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", path]
    inside = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert inside.returncode == 0, inside.stdout[-20_000:]


def raise_loopback() -> None:
    """Set up the one interface that a fresh network namespace has."""
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


@contextmanager
def cut(ports: Iterable[int], how: str) -> Iterator[None]:
    """Let no TCP packet reach these ports for the length of the block: DROP it, or RESET its connection."""
    listed = ", ".join(map(str, sorted(ports)))
    _nft(
        "add table inet cut",
        "add chain inet cut arriving { type filter hook input priority 0; policy accept; }",
        f"add rule inet cut arriving tcp flags & rst == 0 tcp dport {{ {listed} }} counter {how}",
    )
    try:
        yield
    finally:
        _nft("delete table inet cut")


def _nft(*rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input="\n".join(rules) + "\n", text=True, check=True)


def lane_ports(pid: int, others: Iterable[int] = ()) -> set[int]:
    """Return the ports on which a process awaits writers of pages: all that it listens on, but for `others`."""
    connections = psutil.Process(pid).net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return listening - set(others)
