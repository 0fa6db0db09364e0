"""Where a decode worker listens, and what it tells prefill workers of that."""

import socket
from pathlib import Path

import grpc
import pytest
from router_fakes import model_folder
from worker_settings import needed

from pdserve.base.errors import ConfigError
from pdserve.cli import direct
from pdserve.kvtransfer.server import advertised
from pdserve.launch.folder import write_secret
from pdserve.net.rpc import listen
from pdserve.settings.config import WorkerConfig
from pdserve.worker.server import serve


def config(**changes: object) -> WorkerConfig:
    return WorkerConfig.model_validate(needed(Path("m")) | changes)


@pytest.mark.parametrize(
    ("told", "bound", "address"),
    [
        (None, "127.0.0.1:7", "127.0.0.1:7"),
        (None, "[::1]:7", "[::1]:7"),
        ("decode-0.pool", "0.0.0.0:7", "decode-0.pool:7"),
        ("decode-0.pool:9", "0.0.0.0:7", "decode-0.pool:9"),
        ("10.0.0.4:9", "10.0.0.4:7", "10.0.0.4:9"),
        ("fd00::4", "[::]:7", "[fd00::4]:7"),
        ("[fd00::4]:9", "[::]:7", "[fd00::4]:9"),
    ],
)
def test_prefill_workers_are_told_where_they_reach_it(told: str | None, bound: str, address: str) -> None:
    assert advertised(config(handoff_advertise=told), bound) == address


@pytest.mark.parametrize(
    "changes",
    [
        {"handoff_host": "0.0.0.0"},
        {"handoff_host": "::"},
        {"handoff_advertise": "decode-0:http"},
        {"handoff_advertise": ":9"},
    ],
)
async def test_an_address_that_nobody_can_dial_is_refused_before_anything_is_loaded(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="handoff_advertise"):
        await serve(config(**changes))


async def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"handoff_port: cannot listen on 127.0.0.1:{port}"):
            listen(grpc.aio.server(options=[("grpc.so_reuseport", 0)]), "127.0.0.1", port, "handoff_port")


async def test_a_dialect_port_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    own = {"model": str(model_folder(tmp_path)), "secret_file": write_secret(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ExceptionGroup) as refused:
        await direct.serve(config(dialect_port=taken.getsockname()[1], **own))
    assert refused.group_contains(ConfigError, match="dialect_port: cannot listen on 127.0.0.1")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_a_server_listens_on_ipv6_too() -> None:
    address = listen(grpc.aio.server(), "::1", 0, "handoff_port")
    assert address.startswith("[::1]:")
    assert int(address.removeprefix("[::1]:")) > 0


async def test_strangers_are_no_clients_of_a_worker() -> None:
    with pytest.raises(ConfigError, match=r"dialect_host: .* set ssl_certfile, ssl_keyfile and api_keys_file"):
        await direct.serve(config(dialect_host="0.0.0.0", dialect_port=0))


def test_a_worker_that_nobody_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match="routers: at least one is needed, unless dialect_port is set"):
        config(routers=())
    assert config(routers=(), dialect_port=0).routers == ()
