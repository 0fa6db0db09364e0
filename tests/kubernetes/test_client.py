"""Each failure of a request has its error, and a watch yields whole lines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from kube_account import write_kubeconfig
from kube_api import Fault, KubeApi

from pdserve.kubernetes import client as client_module
from pdserve.kubernetes.client import ApiError, Client, RefusedError, UnreachableError
from pdserve.kubernetes.objects import Anything

PODS = "/api/v1/namespaces/chat/pods"


@pytest.fixture
async def client(api: KubeApi, file: Path) -> AsyncIterator[Client]:
    write_kubeconfig(file, {"server": api.address}, "chat")
    async with Client.connected() as client:
        yield client


@asynccontextmanager
async def answering(file: Path, *parts: bytes) -> AsyncIterator[Client]:
    """Have a client whose server answers each request with these bytes, and then ends the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(parts)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    write_kubeconfig(file, {"server": f"http://{host}:{port}"}, "chat")
    async with server, Client.connected() as client:
        yield client


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", r"GET /x: ServerDisconnectedError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "GET /x: ClientPayloadError"),
        (b"no HTTP at all\r\n\r\n", "GET /x: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "the API answered something else"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"metadata": 1}', "the API answered something else"),
    ],
)
async def test_an_answer_that_is_none_or_cannot_be_read_is_no_refusal(file: Path, answer: bytes, expected: str) -> None:
    async with answering(file, answer) as client:
        with pytest.raises(UnreachableError, match=expected):
            await client.get("/x", Anything)


async def test_a_refusal_has_the_status_and_the_apis_words_or_else_https(file: Path, client: Client) -> None:
    with pytest.raises(RefusedError, match="404: pods none not found"):
        await client.get(f"{PODS}/none", Anything)
    async with answering(file, b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\n\r\n<html>") as other:
        with pytest.raises(RefusedError, match="403: Forbidden"):
            await other.get("/x", Anything)


@pytest.mark.parametrize(
    ("fault", "repeats"),
    [
        (Fault("GET", "/pods", status=503), True),
        (Fault("GET", "/pods", status=429, headers={"Retry-After": "0"}), True),
        (Fault("GET", "/pods", status=429, headers={"Retry-After": "3"}), False),
        (Fault("GET", "/pods", status=403), False),
        (Fault("PATCH", "/pods", status=429), True),
        (Fault("PATCH", "/pods", status=500), False),
    ],
    ids=lambda each: f"{each.method} {each.status} {each.headers}" if isinstance(each, Fault) else "",
)
async def test_a_request_is_repeated_for_a_while_and_then_the_last_refusal_is_raised(
    api: KubeApi, client: Client, monkeypatch: pytest.MonkeyPatch, fault: Fault, *, repeats: bool
) -> None:
    looks = count()  # at the clock, which goes on by a second between two: how long an answer takes is nobody's matter
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)
    api.faults.append(fault)
    before = fault.times
    with pytest.raises(RefusedError, match=f"{fault.status}: fault"):
        await (client.pods(PODS) if fault.method == "GET" else client.patch(f"{PODS}/a", {}))
    assert (before - fault.times > 1) == repeats


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"  # whose end is the connection's


async def seen(client: Client) -> list[bytes]:
    return [line async for line in client.changes(PODS, "1")]


async def test_a_watch_ends_with_the_connection_and_a_torn_line_is_none(file: Path) -> None:
    async with answering(file, HEAD, b'{"a": 1}\n{"b":', b' 2}\n{"c"') as client:
        assert [json.loads(line) for line in await seen(client)] == [{"a": 1}, {"b": 2}]


async def test_a_line_of_a_watch_has_a_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_LINE_BYTES", 1000)
    async with answering(file, HEAD, b"x" * 999 + b"\n") as client:
        assert [len(line) for line in await seen(client)] == [1000]
    async with answering(file, HEAD, b"x" * 1000 + b"\n") as client:
        with pytest.raises(UnreachableError, match="1000"):
            await seen(client)


async def test_a_silent_watch_ends(api: KubeApi, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "QUIET_S", 0.1)
    with pytest.raises(UnreachableError, match="Timeout"):
        await seen(client)
    api.faults.append(Fault("WATCH", "/pods", status=500))
    with pytest.raises(ApiError, match="500: fault"):
        await seen(client)
