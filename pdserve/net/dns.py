"""Resolves names to addresses, again every few seconds: processes behind a name come and go."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from pdserve.base.errors import ConfigError, echo
from pdserve.net.rpc import join_address, split_address

logger = logging.getLogger(__name__)

LOOK_UP_S = 10.0  # between two lookups of a name
MIN_LOOK_UP_S = 1.0  # the same, if a new lookup is asked for
MAX_ADDRESSES = 64  # of a name

Resolve = Callable[[str], frozenset[str]]


def resolve(name: str) -> frozenset[str]:
    """Return the addresses, host:port, of host:port; OSError if the lookup fails.

    If a host has IPv4 and IPv6 addresses, only the IPv4 ones are returned: a process with both must be dialled once.
    """
    host, port = split_address(name)
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    hosts = {family: {str(address[0]) for kind, *_, address in found if kind == family} for family, *_ in found}
    chosen = hosts.get(socket.AF_INET) or hosts.get(socket.AF_INET6, set())
    return frozenset(join_address(each, int(port)) for each in sorted(chosen)[:MAX_ADDRESSES])


def check_names(names: Iterable[str], key: str) -> None:
    """Raise ConfigError, which names `key`, unless each name is host:port with a host that can be looked up."""
    for name in names:
        host, port = split_address(name)
        try:
            host.encode("idna")  # as a lookup does
        except UnicodeError as error:
            raise ConfigError(f"{key}: {echo(name, repr)} names no host: {error}") from error
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"{key}: {echo(name, repr)} is not host:port")


async def addresses_of(names: Iterable[str]) -> list[str]:
    """Return the addresses of all names; OSError if a lookup fails, or there is no address."""
    found = [{name} if _is_literal(name) else await asyncio.to_thread(resolve, name) for name in names]
    addresses = sorted(set[str]().union(*found))
    if not addresses:
        raise ConnectionError(f"{', '.join(names)}: no address was found")
    return addresses


class Lookups:
    """Looks names up again and again. A literal address resolves to itself."""

    def __init__(self, names: Iterable[str], key: str, found: Callable[[str, frozenset[str]], None]) -> None:
        """`found` is called with a name and its addresses after each lookup. ConfigError: `key` has a bad name."""
        self._again = {name: asyncio.Event() for name in names}
        self._found = found
        check_names(self._again, key)

    def again(self) -> None:
        for event in self._again.values():
            event.set()

    async def run(self, resolve: Resolve = resolve) -> None:
        """Look names up until cancelled; return at once if all are literal addresses. `resolve` runs in a thread."""
        pool = ThreadPoolExecutor(1, "names")
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._again:
                    if _is_literal(name):
                        self._found(name, frozenset((name,)))
                    else:
                        tasks.create_task(self._follow(name, resolve, pool), name=f"name {name}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Python waits for a running lookup at its exit

    async def _follow(self, name: str, resolve: Resolve, pool: ThreadPoolExecutor) -> None:
        again, problem = self._again[name], ""
        while True:
            again.clear()
            try:
                self._found(name, await asyncio.wrap_future(pool.submit(resolve, name)))
                problem = ""
            except OSError as error:  # the addresses found before are still the best known
                before, problem = problem, str(error.strerror or error)
                logger.log(logging.DEBUG if problem == before else logging.WARNING, "%s: %s", name, problem)
            await asyncio.sleep(MIN_LOOK_UP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_UP_S - MIN_LOOK_UP_S):
                    await again.wait()


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(split_address(name)[0])
    except ValueError:
        return False
    return True
