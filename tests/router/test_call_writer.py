"""Invariant tried: replies go out in their order, one at a time, each once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from pdserve.net.rpc import AnyContext, abort
from pdserve.router.frontend.call_writer import CallWriter

METHOD = "/test.Replies/Get"
LARGE = bytes(64 << 20)  # more than a connection holds for a client that does not read
UNLIMITED = [("grpc.max_receive_message_length", -1)]

Handle = Callable[[AnyContext], Awaitable[None]]
Call = grpc.aio.UnaryStreamCall[bytes, bytes]


@asynccontextmanager
async def calling(handle: Handle) -> AsyncIterator[Call]:
    """Serve a method and call it."""

    async def serve(_request: bytes, context: AnyContext) -> None:
        await handle(context)

    handlers = {"Get": grpc.unary_stream_rpc_method_handler(serve)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Replies", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED))
        call: Call = channel.unary_stream(METHOD)(b"")
        stack.callback(call.cancel)
        yield call


async def fill(writer: CallWriter) -> None:
    """Begin a write that does not end before the client reads."""
    await write(writer, b"first")
    assert writer.write([LARGE])


async def write(writer: CallWriter, reply: bytes) -> None:
    writer.write([reply])
    await writer.drain()


async def test_replies_come_in_order_each_once() -> None:
    async def handle(context: AnyContext) -> None:
        async with CallWriter(context) as writer:
            for number in range(200):
                writer.write(b"%d" % (10 * number + each) for each in range(number % 4))
                if number % 3 == 0:
                    await asyncio.sleep(0)
                if number % 50 == 0:
                    await writer.drain()
            await writer.drain()

    async with calling(handle) as call:
        replies = [reply async for reply in call]
    assert replies == [b"%d" % (10 * number + each) for number in range(200) for each in range(number % 4)]


async def test_one_reply_after_another_leaves_the_writer_free() -> None:
    free: list[bool] = []

    async def handle(context: AnyContext) -> None:
        async with CallWriter(context) as writer:
            for number in range(5):
                free.append(writer.write([b"%d" % number]))
                await writer.drain()

    async with calling(handle) as call:
        assert [reply async for reply in call] == [b"0", b"1", b"2", b"3", b"4"]
    assert free == [True] * 5


async def test_a_client_that_does_not_read_lets_replies_wait_until_it_does() -> None:
    is_full = asyncio.Event()

    async def handle(context: AnyContext) -> None:
        is_free = asyncio.Event()
        async with CallWriter(context) as writer:
            await fill(writer)
            assert not writer.write([b"last"])
            writer.when_free(is_free.set)
            is_full.set()
            await is_free.wait()
            await writer.drain()

    async with calling(handle) as call:
        await is_full.wait()
        assert [reply async for reply in call] == [b"first", LARGE, b"last"]


async def test_a_call_is_aborted_in_the_middle_of_a_write() -> None:
    is_full = asyncio.Event()

    async def handle(context: AnyContext) -> None:
        async with CallWriter(context) as writer:
            await fill(writer)
            writer.write([b"never"])
        is_full.set()
        await abort(context, grpc.StatusCode.ABORTED, "too slow")

    async with calling(handle) as call:
        await is_full.wait()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            assert b"never" not in [reply async for reply in call]
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.ABORTED, "too slow")


async def test_a_call_is_aborted_before_its_first_reply_has_been_passed_on() -> None:
    async def handle(context: AnyContext) -> None:
        async with CallWriter(context) as writer:
            writer.write([b"a", b"b"])
        await abort(context, grpc.StatusCode.ABORTED, "at once")

    async with calling(handle) as call:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [reply async for reply in call]
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.ABORTED, "at once")


async def test_writing_to_a_client_that_has_gone_fails_again_and_again() -> None:
    has_gone, tasks = asyncio.Event(), list[asyncio.Task[None]]()

    async def write_on(context: AnyContext) -> None:
        async with CallWriter(context) as writer:
            writer.write([b"first"])
            await writer.drain()
            await has_gone.wait()
            for _ in range(2):
                with pytest.raises(Exception, match=r"^Failed (.execute_batch.|grpc_call_start_batch)"):
                    await write(writer, b"second")

    async def handle(context: AnyContext) -> None:
        try:
            tasks.append(asyncio.create_task(write_on(context)))
            await asyncio.shield(tasks[0])
        except asyncio.CancelledError:
            has_gone.set()
            raise

    async with calling(handle) as call:
        assert await call.read() == b"first"
        call.cancel()
        async with asyncio.timeout(10.0):
            await tasks[0]
