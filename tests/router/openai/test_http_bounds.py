"""Nothing that a client does, or leaves undone, holds more than its share: each test ends with an idle router."""

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from http_door import HttpRouter, StartHttp
from router_fakes import PATIENCE_S

from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai import connection, reply

WAITS_S = 0.2
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(door: HttpRouter) -> AsyncIterator[Pipe]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        yield reader, writer
    finally:
        writer.close()


POST = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def request(path: str = "/v1/completions", **body: object) -> bytes:
    data = json.dumps(body).encode()
    return POST % path.encode() + b"content-length: %d\r\n\r\n%b" % (len(data), data)


async def answer_to(door: HttpRouter, *parts: bytes) -> bytes:
    """Send bytes and return what comes until the router closes the connection."""
    async with asyncio.timeout(PATIENCE_S), connected(door) as (reader, writer):
        for part in parts:
            writer.write(part)
        return await reader.read()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything(start_http: StartHttp, *, stream: bool) -> None:
    door = await start_http()
    decode = door.router.workers["d0"]
    decode.max_step = 3
    async with connected(door) as (reader, writer):
        writer.write(request(prompt="hello", max_tokens=100, n=2, stream=stream))
        if stream:
            await reader.readuntil(b'"text":"')
        await decode.until(lambda: bool(decode.decodes))
    await decode.until(lambda: bool(decode.cancels))
    await door.router.until_idle()


async def test_a_client_that_leaves_while_its_prompt_waits_frees_everything(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    async with connected(door) as (_, writer):
        writer.write(request(prompt=["hello", "abc"], stream=True))
        await door.router.until_status(lambda status: status.num_held == 2)
    await door.router.until_idle()


async def test_one_refused_prompt_of_several_ends_the_others(start_http: StartHttp) -> None:
    door = await start_http()
    door.router.workers["p0"].is_paused = True
    response = await door.post("/v1/completions", prompt=["hello", [999_999]])
    assert response.status_code == 400
    await door.router.until_idle()


async def test_bodies_over_the_limit_are_refused_before_they_are_read(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    for path in (b"/v1/completions", b"/tokenize"):
        announced = POST % path + b"content-length: 99999999\r\n\r\n{"
        shown = await answer_to(door, announced)
        assert shown.startswith(b"HTTP/1.1 413 "), shown
        assert f"over the limit of {PUBLIC_MESSAGE_BYTES}".encode() in shown
        chunked = POST % path + b"transfer-encoding: chunked\r\n\r\n"
        async with asyncio.timeout(PATIENCE_S), connected(door) as (reader, writer):
            writer.write(chunked)
            for _ in range(PUBLIC_MESSAGE_BYTES // 65536 + 1):
                writer.write(b"10000\r\n%b\r\n" % bytes(65536))
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")


async def test_heads_without_end_and_floods_of_headers_are_refused(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    flood = b"".join(b"x-%d: %b\r\n" % (number, b"y" * 50) for number in range(1500))
    for rest in (b"", b"\r\n"):
        shown = await answer_to(door, b"GET /health HTTP/1.1\r\nhost: x\r\n", flood, rest)
        assert shown.startswith(b"HTTP/1.1 431 "), shown[:100]


async def test_what_is_not_http_is_refused_in_openais_shape(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    shown = await answer_to(door, b"\x16\x03\x01 not http\r\n\r\n")
    head, _, body = shown.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("part", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\n", request(prompt="a")[:-1]])
async def test_what_does_not_come_in_time_is_given_up(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.05)
    door = await start_http(pair=False)
    assert (await answer_to(door, part)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_behind_another_request_has_its_time_too(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.05)
    door = await start_http(pair=False)
    shown = await answer_to(door, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + request(prompt="a")[:-1])
    assert shown.startswith(b"HTTP/1.1 200 ")
    assert shown.count(b"HTTP/1.1 408 ") == 1


async def test_connections_over_the_limit_are_told_to_come_back(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 1)
    door = await start_http(pair=False)
    async with connected(door) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        shown = await answer_to(door)
    assert shown.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in shown


async def test_a_reader_that_takes_nothing_is_cut_off(start_http: StartHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOOK_S", 0.02)
    monkeypatch.setattr(connection, "STALLED_S", 0.1)
    door = await start_http(max_unsent_bytes=1024)
    for worker in door.router.workers.values():
        worker.logprobs_per_token = 20
    async with connected(door) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(prompt="hello", max_tokens=2000, n=8, logprobs=20, stream=True))
        decode = door.router.workers["d0"]
        await decode.until(lambda: bool(decode.cancels))
    await door.router.until_idle()


async def test_a_reader_of_a_last_response_that_takes_nothing_is_cut_off(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = connection.Peer

    def with_little_room(tcp: socket.socket, now_s: float) -> connection.Peer:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return peer(tcp, now_s)

    is_lost = asyncio.Event()
    lose = connection.Connection.connection_lost

    def connection_lost(of: connection.Connection, error: Exception | None) -> None:
        lose(of, error)
        is_lost.set()

    monkeypatch.setattr(connection, "Peer", with_little_room)
    monkeypatch.setattr(connection.Connection, "connection_lost", connection_lost)
    monkeypatch.setattr(connection, "LOOK_S", 0.02)
    monkeypatch.setattr(connection, "STALLED_S", 0.1)
    door = await start_http(pair=False)
    with socket.socket() as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tcp.connect(("127.0.0.1", door.port))
        asked = request("/tokenize", prompt="hello " * 1000)
        tcp.sendall(asked.replace(b"host: localhost", b"host: localhost\r\nconnection: close"))
        async with asyncio.timeout(PATIENCE_S):
            await is_lost.wait()


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_what_comes_in_the_turn_of_a_lost_connection_is_dropped(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    lose = reply.Stream.lost

    def lost(stream: reply.Stream) -> None:
        lose(stream)
        taken.append(stream.take(stream.parts[0], [Gain(0, [1], "x")]))

    monkeypatch.setattr(reply.Stream, "lost", lost)
    door = await start_http()
    decode = door.router.workers["d0"]
    decode.max_step = 1
    async with connected(door) as (reader, writer):
        writer.write(request(prompt="hello", max_tokens=100, stream=True))
        for _ in range(2):
            await reader.readuntil(b'"text":"')
    await decode.until(lambda: bool(decode.cancels))
    assert taken == [False]
    await door.router.until_idle()


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_nothing_is_written_to_a_client_that_left_while_its_prompts_were_opened(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_open, is_lost = asyncio.Event(), asyncio.Event()
    open_part, lose = reply.Stream.begin_part, reply.Stream.lost

    async def opened(stream: reply.Stream, *part: Any) -> None:  # noqa: ANN401
        await open_part(stream, *part)
        is_open.set()
        await is_lost.wait()

    def lost(stream: reply.Stream) -> None:
        lose(stream)
        is_lost.set()

    monkeypatch.setattr(reply.Stream, "begin_part", opened)
    monkeypatch.setattr(reply.Stream, "lost", lost)
    door = await start_http()
    door.router.workers["p0"].is_paused = True
    async with connected(door) as (_, writer):
        asked = request(prompt=["hello", "abc"], stream=True)
        writer.write(asked.replace(b"host: localhost\r\n", b"host: localhost\r\nx-begin: at-once\r\n"))
        await is_open.wait()
    await is_lost.wait()
    await door.router.until_idle()
    assert [each.message for each in caplog.records if each.name.startswith("uvicorn")] == []


async def test_silence_is_broken_by_comments(start_http: StartHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.05)
    door = await start_http()
    prefill = door.router.workers["p0"]
    prefill.is_paused = True
    async with connected(door) as (reader, writer):
        writer.write(request(prompt="hello", max_tokens=1, stream=True))
        await reader.readuntil(b": keep-alive\n\n")
        await reader.readuntil(b": keep-alive\n\n")
        spec = prefill.prefills[0].spec
        await prefill.step([prefill.delta(spec, 0, 0, is_last=True)])
        await reader.readuntil(b"data: [DONE]\n\n")


async def test_a_stream_begins_before_its_first_token_if_its_client_asks_for_that(start_http: StartHttp) -> None:
    door = await start_http()
    prefill = door.router.workers["p0"]
    prefill.is_paused = True
    async with asyncio.timeout(PATIENCE_S), connected(door) as (reader, writer):
        asked = request(prompt="hello", max_tokens=1, stream=True)
        writer.write(asked.replace(b"host: localhost\r\n", b"host: localhost\r\nx-begin: at-once\r\n"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"x-pdserve-request-id: " in head
        await prefill.until(lambda: bool(prefill.prefills))
        spec = prefill.prefills[0].spec
        await prefill.step([prefill.delta(spec, 0, 0, is_last=True)])
        await reader.readuntil(b"data: [DONE]\n\n")


async def test_requests_in_a_row_and_behind_each_other_share_a_connection(start_http: StartHttp) -> None:
    door = await start_http()
    one = request(prompt="hello", max_tokens=2, stream=True)
    async with asyncio.timeout(PATIENCE_S), connected(door) as (reader, writer):
        writer.write(one + one)
        for _ in range(2):
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.write(request(prompt="hello", max_tokens=2))
        assert b'"finish_reason":"length"' in await reader.readuntil(b'"pdserve"')


async def test_a_client_that_leaves_during_its_second_stream_cancels_it(start_http: StartHttp) -> None:
    door = await start_http()
    decode = door.router.workers["d0"]
    decode.max_step = 3
    async with connected(door) as (reader, writer):
        one = [request(prompt="hello", max_tokens=number, stream=True) for number in (2, 100)]
        writer.write(b"".join(one))
        await reader.readuntil(b"data: [DONE]\n\n")
        await reader.readuntil(b'"text":"')
        await decode.until(lambda: len(decode.decodes) == 2)
    await decode.until(lambda: bool(decode.cancels))
    await door.router.until_idle()


async def test_a_stream_ends_a_connection_that_its_client_does_not_keep(start_http: StartHttp) -> None:
    door = await start_http()
    asked = request(prompt="hello", max_tokens=2, stream=True)
    shown = await answer_to(door, asked.replace(b"host: localhost\r\n", b"host: localhost\r\nconnection: close\r\n"))
    assert b"\r\nconnection: close\r\n" in shown.partition(b"\r\n\r\n")[0]
    assert shown.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("asked", [{"stream": True}, {"stream": False}, {"prompt": [999_999]}])
async def test_what_served_a_request_is_gone_without_a_look_for_cycles(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    served: list[weakref.ref[object]] = []
    close = reply.Reply.close

    def closed(of: reply.Reply, intake: Intake) -> None:
        close(of, intake)
        served.extend(weakref.ref(each) for each in (of, of.connection, of.connection.cycle))

    monkeypatch.setattr(reply.Reply, "close", closed)
    door = await start_http()
    gc.disable()
    try:
        one = request(**{"prompt": "hello", "max_tokens": 2, **asked})
        await answer_to(door, one.replace(b"host: localhost\r\n", b"host: localhost\r\nconnection: close\r\n"))
        await door.router.until_idle()
        assert [each() for each in served] == [None] * 3
    finally:
        gc.enable()


async def test_a_ledger_begins_when_the_last_of_its_request_is_read(start_http: StartHttp) -> None:
    door = await start_http()
    decode = door.router.workers["d0"]
    decode.is_paused = True
    async with connected(door) as (reader, writer):
        writer.write(request(prompt="a", max_tokens=2) + request(prompt="b", max_tokens=1))
        await decode.until(lambda: bool(decode.decodes))
        await asyncio.sleep(WAITS_S)  # the first answer lasts, with the other request read and behind it
        decode.is_paused = False
        decode._start(decode._decode(next(iter(decode.specs))))
        _, second = [await one_answer(reader) for _ in range(2)]
    assert second["timings_ms"]["tokenized"] > 1e3 * WAITS_S


async def one_answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read one response that is not a stream; return its ledger."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
    ledger: dict[str, Any] = json.loads(await reader.readexactly(int(length)))["pdserve"]
    return ledger


async def test_streams_end_before_the_router_does(start_http: StartHttp) -> None:
    door = await start_http()
    prefill = door.router.workers["p0"]
    prefill.is_paused = True
    async with connected(door) as (reader, writer):
        writer.write(request(prompt="hello", max_tokens=1, stream=True))
        await prefill.until(lambda: bool(prefill.prefills))
        door.router.stop.set()
        async with connected(door) as (other, late):
            while True:
                late.write(request(prompt="hello", max_tokens=1))
                line = await other.readline()
                if line.startswith(b"HTTP/1.1 503 "):
                    break
        spec = prefill.prefills[0].spec
        await prefill.step([prefill.delta(spec, 0, 0, is_last=True)])
        await reader.readuntil(b"data: [DONE]\n\n")
