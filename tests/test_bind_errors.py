"""Whoever cannot listen says why, and what helps; IPv6 addresses may stand in brackets."""

import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from pdserve.base.errors import CommandError, ConfigError
from pdserve.launch.folder import claimed_folder, claimed_port, free_port
from pdserve.net.rpc import listen, why_not_bound
from pdserve.observe.metrics_server import showing
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.openai import server

ELSEWHERE, UNKNOWN = "192.0.2.1", "no-such-host.invalid"  # reserved for documentation, and for no host
CAUSES = {
    ELSEWHERE: r"\[?192.0.2.1\]?:\d+: that is no address of this machine; give one of its own",
    UNKNOWN: r"the host is not known here \(.+\); give a name or address of this machine",
    "": r"the port is in use; end what listens there, or take another port",
}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def config(**settings: object) -> RouterConfig:
    return RouterConfig(model="m", secret_file=Path("secret"), **settings)


async def over_grpc(host: str, port: int) -> None:
    grpc_server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    listen(grpc_server, host, port, "port")
    await grpc_server.stop(None)


async def metrics(host: str, port: int) -> None:
    async with showing(config(metrics_host=host, metrics_port=port), lambda: ()):
        pass


async def over_http(host: str, port: int) -> None:
    listening = await server._listen(config(http_host=host, http_port=port), lambda: None)  # type: ignore[arg-type]
    listening.close()


async def cluster(host: str, port: int) -> None:
    with claimed_port(host, port, 8000):
        pass


@pytest.mark.parametrize("host", CAUSES)
@pytest.mark.parametrize("bind", [over_grpc, metrics, over_http, cluster])
async def test_each_listener_names_the_cause(
    bind: Callable[[str, int], Awaitable[None]], host: str, taken: int
) -> None:
    with pytest.raises(ConfigError, match=CAUSES[host]):
        await bind(host or "127.0.0.1", taken)


@pytest.mark.parametrize("bind", [over_grpc, metrics, over_http, cluster])
async def test_an_address_may_stand_in_brackets(bind: Callable[[str, int], Awaitable[None]]) -> None:
    await bind("[::1]", 0)


def test_a_port_for_privileged_users_is_named_as_such() -> None:
    text = why_not_bound("127.0.0.1", 80, PermissionError(errno.EACCES, "Permission denied"))
    assert text == "this user may not listen on port 80 (Permission denied); take one from 1024 on"


@pytest.mark.parametrize("host", [ELSEWHERE, UNKNOWN])
def test_a_host_where_no_port_is_free_is_named_with_the_cause(host: str) -> None:
    with pytest.raises(ConfigError, match=CAUSES[host].removeprefix(r"\[?192.0.2.1\]?:\d+: ")):
        free_port(host)


def test_a_folder_that_cannot_be_made_is_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    cause = r"cannot make .*/file/.*: Not a directory; set XDG_RUNTIME_DIR"
    with pytest.raises(CommandError, match=cause), claimed_folder("x"):
        pass
