"""A process that holds a stream to its parent, which listens on `stream_peer.py PORT`, and listens for one itself.

Prints its own port once its stream stands.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable

import grpc

from pdserve.net.rpc import channel_options, server_options

METHOD = "/test.Service/Stream"
MESSAGE_BYTES = 1 << 20


class Streams(grpc.GenericRpcHandler):
    """Answers each message of a stream with itself; `ended` is called when one has ended."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._answer) if details.method == METHOD else None

    async def _answer(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        del context
        try:
            async for message in messages:
                yield message
        finally:
            self._ended()


async def listening(ended: Callable[[], None]) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=server_options(MESSAGE_BYTES))
    server.add_generic_rpc_handlers((Streams(ended),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def hold_stream(port: int, on_standing: Callable[[], None]) -> None:
    """Return or raise once the stream ends."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options(MESSAGE_BYTES)) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"hello")
        assert await call.read() == b"hello"
        on_standing()
        await call.read()


async def main(parent: int) -> None:
    _, port = await listening(lambda: None)

    def tell() -> None:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()

    await hold_stream(parent, tell)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
