"""Names are looked up again and again; a literal address leads to itself, and who cannot say changes nothing."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from pdserve.base.errors import ConfigError
from pdserve.cli import processes
from pdserve.cli.app import main
from pdserve.kubernetes.watcher import serve
from pdserve.net import dns
from pdserve.net.dns import Lookups, addresses_of, resolve
from pdserve.settings.autoscaler import WatcherConfig

Answers = list[Callable[[], frozenset[str]]]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "LOOK_UP_S", 0.002)
    monkeypatch.setattr(dns, "MIN_LOOK_UP_S", 0.001)


async def followed(*given: str, answers: Answers) -> list[tuple[str, frozenset[str]]]:
    """Return what is found until the resolver has given all of its answers, and has failed twice after them."""
    found: list[tuple[str, frozenset[str]]] = []
    over, loop, failures = asyncio.Event(), asyncio.get_running_loop(), count()

    def answer(_: str) -> frozenset[str]:
        if not answers:
            if next(failures):  # the failure before has been logged
                loop.call_soon_threadsafe(over.set)
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return answers.pop(0)()

    lookups = Lookups(given, "routers", lambda name, addresses: found.append((name, addresses)))
    running = asyncio.create_task(lookups.run(answer))
    async with asyncio.timeout(10):
        await over.wait()
    running.cancel()
    await asyncio.wait([running])
    return found


@pytest.mark.usefixtures("at_once")
async def test_a_name_is_looked_up_again_and_a_failure_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> frozenset[str]:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    one, two = frozenset({"10.0.0.1:1"}), frozenset({"10.0.0.1:1", "10.0.0.2:1"})
    caplog.set_level(logging.WARNING)
    found = await followed("routers:1", answers=[lambda: one, fail, fail, lambda: two, frozenset])
    assert found == [("routers:1", one), ("routers:1", two), ("routers:1", frozenset())]
    assert caplog.text.count("routers:1: try again") == 2  # once for each time that it begins


async def test_whoever_has_lost_an_address_lets_its_name_be_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "MIN_LOOK_UP_S", 0.001)
    found = asyncio.Queue[frozenset[str]]()
    lookups = Lookups(("routers:1",), "routers", lambda _, addresses: found.put_nowait(addresses))
    running = asyncio.create_task(lookups.run(lambda name: frozenset({name})))
    async with asyncio.timeout(5):  # less than LOOK_UP_S
        await found.get()
        lookups.again()
        await found.get()
    running.cancel()
    await asyncio.wait([running])


async def test_literal_addresses_lead_to_themselves_and_are_not_looked_up() -> None:
    found: list[tuple[str, frozenset[str]]] = []
    lookups = Lookups(("10.0.0.1:1", "[fd00::1]:2"), "routers", lambda *each: found.append(each))
    await lookups.run(lambda _: pytest.fail("looked up"))
    assert found == [(each, frozenset((each,))) for each in ("10.0.0.1:1", "[fd00::1]:2")]


async def test_whoever_asks_gets_all_addresses_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "resolve", lambda name: frozenset({f"10.0.0.1{name[-2:]}"} if name != "gone:2" else ()))
    assert await addresses_of(("b:2", "10.0.0.3:3")) == ["10.0.0.1:2", "10.0.0.3:3"]
    with pytest.raises(OSError, match=r"^gone:2: no address was found"):
        await addresses_of(("gone:2",))


BAD_NAMES = ["router", "router:", "router:0", "router:65536", ":1", "fd00::1", "router:http", "a..b:1", f"{'x' * 64}:1"]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_a_name_that_cannot_be_looked_up_is_refused_by_all_who_would(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"^routers: .* (is not host:port|names no host)"):
        Lookups((name,), "routers", lambda *_: None)
    with pytest.raises(ConfigError, match=r"^routers: "):
        await serve(WatcherConfig.model_validate({"routers": (name,), "secret_file": tmp_path}))
    monkeypatch.setattr(processes, "end_on_signals", lambda: None)
    given = ("--policy", "x", "--routers", name, "--secret-file", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pdserve", "autoscale", "run", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err.partition(": ")[2].startswith("routers: ")) == (2, True)


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        (("10.0.0.1", "fd00::1", "10.0.0.2"), {"10.0.0.1:7", "10.0.0.2:7"}),
        (("fd00::1", "fd00::2"), {"[fd00::1]:7", "[fd00::2]:7"}),
        (("10.0.0.1", "10.0.0.1"), {"10.0.0.1:7"}),
        ([f"10.0.0.{n}" for n in range(100)], None),
    ],
)
def test_of_a_host_with_both_kinds_of_addresses_the_ipv4_ones_are_taken_and_only_so_many(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], addresses: set[str] | None
) -> None:
    def look_up(_host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        kinds = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts}
        return [(kinds[host], socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = resolve("routers:7")
    assert found == addresses if addresses else len(found) == dns.MAX_ADDRESSES
