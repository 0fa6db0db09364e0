"""Clients that begin a TLS handshake and go no further hold few descriptors for a short time, and keep nobody out."""

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from http_door import HttpRouter, StartHttp
from router_fakes import PATIENCE_S
from scraping import scrape

from pdserve.launch.authority import write_certificates
from pdserve.net import rpc
from pdserve.router.frontend.openai import connection, server

LIMIT = 4
TIMEOUT_S = 0.3
ON_ROUTERS_LOOP = pytest.mark.asyncio(loop_factories=["uvloop"])

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, Any]:
    write_certificates(tmp_path, ("127.0.0.1",), 3)
    return {"ssl_certfile": tmp_path / "public/tls.crt", "ssl_keyfile": tmp_path / "public/tls.key"}


async def silent(stack: AsyncExitStack, port: int, *, hello: bytes = b"") -> asyncio.Task[bytes]:
    """Connect and send no more than `hello`; return what reads until the router ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(hello)
    return asyncio.create_task(until_end(reader))


async def until_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def is_believed(door: HttpRouter, folder: Path) -> bool:
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    async with httpx.AsyncClient(base_url=door.router.addresses.http, verify=context) as client:
        try:
            return (await client.get("/health")).status_code == 200
        except httpx.ConnectError:
            return False


@ON_ROUTERS_LOOP
async def test_of_too_many_handshakes_the_oldest_end_and_honest_clients_come_in(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown: dict[str, Any]
) -> None:
    monkeypatch.setattr(server, "MAX_HANDSHAKES", LIMIT)
    door = await start_http(pair=False, **shown)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        waiting = [await silent(stack, door.port, hello=b"\x16\x03\x01") for _ in range(3 * LIMIT)]
        assert await asyncio.gather(*waiting[: 2 * LIMIT]) == [b""] * 2 * LIMIT
        assert not any(task.done() for task in waiting[2 * LIMIT :])
        assert await is_believed(door, tmp_path)
        assert await waiting[2 * LIMIT] == b""
        assert not any(task.done() for task in waiting[2 * LIMIT + 1 :])


@ON_ROUTERS_LOOP
async def test_of_a_burst_of_handshakes_no_more_than_the_limit_stay(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]
) -> None:
    monkeypatch.setattr(server, "MAX_HANDSHAKES", LIMIT)
    door = await start_http(pair=False, **shown)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        waiting = await asyncio.gather(*(silent(stack, door.port) for _ in range(8 * LIMIT)))
        for _, ended in zip(range(7 * LIMIT), asyncio.as_completed(waiting), strict=False):
            await ended
        assert sum(not task.done() for task in waiting) == LIMIT


def hello_of(tls: ssl.SSLObject, outgoing: ssl.MemoryBIO) -> bytes:
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@ON_ROUTERS_LOOP
async def test_a_hello_that_comes_with_its_connection_is_answered(
    start_http: StartHttp, tmp_path: Path, shown: dict[str, Any]
) -> None:
    door = await start_http(pair=False, **shown)
    context, outgoing = ssl.create_default_context(cafile=tmp_path / "ca.crt"), ssl.MemoryBIO()
    hello = hello_of(context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1"), outgoing)
    with socket.create_connection(("127.0.0.1", door.port)) as tcp:
        tcp.sendall(hello)  # the router's event loop is this one, and has not run
        tcp.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.get_running_loop().sock_recv(tcp, 1) == b"\x16"


@ON_ROUTERS_LOOP
async def test_a_request_before_the_handshake_is_not_served_behind_it(
    start_http: StartHttp, tmp_path: Path, shown: dict[str, Any]
) -> None:
    door = await start_http(pair=False, **shown)
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    with socket.create_connection(("127.0.0.1", door.port)) as tcp:
        tcp.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        _, writer = await asyncio.open_connection(sock=tcp)
        with pytest.raises(OSError):  # noqa: PT011 - of TLS, or a connection that is reset
            await writer.start_tls(context, server_hostname="127.0.0.1")
        writer.close()


@ON_ROUTERS_LOOP
async def test_who_has_a_last_response_and_does_not_end_tls_is_cut_off(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown: dict[str, Any]
) -> None:
    monkeypatch.setattr(connection, "LOOK_S", 0.02)
    door = await start_http(pair=False, **shown)
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    async with asyncio.timeout(PATIENCE_S):
        while hello := hello_of(tls, outgoing):
            writer.write(hello)
            incoming.write(await reader.read(65536))
        tls.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        writer.write(outgoing.read())
        incoming.write(await reader.read())
        assert tls.read(65536).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
@ON_ROUTERS_LOOP
async def test_a_handshake_that_does_not_come_is_given_up(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any], hello: bytes
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.05)
    door = await start_http(pair=False, **shown)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        await (await silent(stack, door.port, hello=hello))
    shown = await asyncio.to_thread(scrape, door.router.addresses.metrics)
    assert shown.value("pdserve_calls_denied_total", reason="handshake") == 1


async def test_grpc_takes_no_more_connections_than_the_limit_and_gives_handshakes_up(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown: dict[str, Any]
) -> None:
    monkeypatch.setattr(rpc, "MAX_CONNECTIONS", LIMIT)
    monkeypatch.setattr(rpc, "HANDSHAKE_TIMEOUT_S", TIMEOUT_S)
    door = await start_http(pair=False, **shown)
    address = door.router.addresses.public
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        waiting = [await silent(stack, int(address.rpartition(":")[2])) for _ in range(3 * LIMIT)]
        assert await asyncio.gather(*waiting[LIMIT:]) == [b""] * 2 * LIMIT
        assert not any(task.done() for task in waiting[:LIMIT])
        assert await asyncio.gather(*waiting[:LIMIT]) == [b""] * LIMIT
        known = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
        channel = await stack.enter_async_context(grpc.aio.secure_channel(address, known))
        await HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_a_certificate_that_changes_is_shown_to_the_next_connection(
    start_http: StartHttp, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        write_certificates(folder, ("127.0.0.1",), 3)
    shown = tmp_path / "shown"
    shown.mkdir()
    for name in ("tls.crt", "tls.key"):
        (shown / name).symlink_to(folders[0] / "public" / name)
    door = await start_http(pair=False, ssl_certfile=shown / "tls.crt", ssl_keyfile=shown / "tls.key")
    assert door.router.addresses.http.startswith("https://")
    assert await is_believed(door, folders[0])
    for name in ("tls.crt", "tls.key"):
        (shown / name).unlink()
        (shown / name).symlink_to(folders[1] / "public" / name)
    assert await is_believed(door, folders[1])
    assert not await is_believed(door, folders[0])
