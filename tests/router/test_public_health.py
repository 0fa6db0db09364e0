"""Health of the public port needs no key: who asks for it holds up nobody, whatever it sends or does not read."""

import asyncio
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fakes import RouterUnderTest, StartRouter, error_of

from pdserve.net import health

SERVICE = "pdserve.v1.InferenceService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = (4).to_bytes(2) + bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE is 0
HEADERS, SETTINGS, END_HEADERS = 1, 4, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def header(name: str, value: str) -> bytes:
    """Return a literal header of HPACK, of neither table and without Huffman coding."""
    return b"\0" + b"".join(bytes((len(each),)) + each.encode() for each in (name, value))


async def unread_watch(address: str) -> asyncio.StreamWriter:
    """Watch the service's health by a connection that lets the router write nothing."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    named = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "router"}
    named |= {"te": "trailers", "content-type": "application/grpc"}  # codespell:ignore te
    request = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    headers = frame(HEADERS, END_HEADERS, 1, b"".join(header(*each) for each in named.items()))
    message = frame(0, 0, 1, b"\0" + len(request).to_bytes(4) + request)
    writer.write(PREFACE + frame(SETTINGS, 0, 0, NO_WINDOW) + headers + message)
    await writer.drain()
    return writer


async def until_health(router: RouterUnderTest, status: object) -> None:
    async with asyncio.timeout(5):
        watch = health_pb2_grpc.HealthStub(router.public).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async for state in watch:
            if state.status == status:
                return


async def code_of(router: RouterUnderTest, method: str, request: bytes | None) -> grpc.StatusCode:
    call = router.public.stream_stream(f"/grpc.health.v1.Health/{method}")()
    with suppress(asyncio.InvalidStateError):  # it has ended already
        if request is not None:
            await call.write(request)
    async with asyncio.timeout(5):
        return await call.code()


async def test_a_watcher_that_takes_nothing_stops_neither_health_nor_a_drain(start_router: StartRouter) -> None:
    router = await start_router()
    stuck = await unread_watch(router.addresses.public)
    try:
        await until_health(router, NOT_SERVING)
        prefill, _ = await router.pair()
        await until_health(router, SERVING)
        prefill.is_paused = True
        running = router.generate(text="a")
        await prefill.until(lambda: bool(prefill.prefills))
        router.stop.set()
        await until_health(router, NOT_SERVING)
        assert (await error_of(router.generate(text="b")))[1] == "this router is shutting down"
        running.cancel()
    finally:
        stuck.close()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_requests_are_small_come_soon_and_name_a_service(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    router = await start_router()
    large = health_pb2.HealthCheckRequest(service="x" * health.MAX_REQUEST_BYTES).SerializeToString()
    unknown = health_pb2.HealthCheckRequest(service="rea\ndy").SerializeToString()
    assert await code_of(router, method, large) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(router, method, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(router, method, unknown) is grpc.StatusCode.NOT_FOUND
    monkeypatch.setattr(health, "READ_TIMEOUT_S", 0.05)
    assert await code_of(router, method, None) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_so_many_may_watch_and_who_leaves_makes_room(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    router = await start_router()
    stub, request = health_pb2_grpc.HealthStub(router.public), health_pb2.HealthCheckRequest()
    watching = [stub.Watch(request) for _ in range(2)]
    for each in watching:
        assert (await each.read()).status == SERVING
    assert await stub.Watch(request).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Check(request)).status == SERVING
    watching.pop().cancel()
    async with asyncio.timeout(5):
        while True:
            watching.append(stub.Watch(request))
            with suppress(grpc.aio.AioRpcError):  # the one that left may be here still
                assert (await watching[-1].read()).status == SERVING
                break
    for each in watching:
        each.cancel()
