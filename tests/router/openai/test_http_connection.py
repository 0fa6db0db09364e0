"""One connection's own bounds, on a transport that is played."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from pdserve.router.frontend.openai.connection import MAX_HEAD_BYTES, Connection


class Played(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:  # noqa: ANN401 - asyncio's
        self.written += data

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connected(transport: Played) -> Connection:
    config = uvicorn.Config(_app, lifespan="off", ws="none", interface="asgi3", log_config=None)
    config.load()
    made = Connection(config, ServerState(), {})
    made.connection_made(transport)
    return made


async def test_the_rest_of_a_body_is_not_of_the_next_head() -> None:
    transport = Played()
    made = connected(transport)
    size = MAX_HEAD_BYTES + 1
    made.data_received(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size)
    made.data_received(bytes(size) + b"GET /health HTTP/1.1\r\n")
    assert transport.written == b""
    made.data_received(b"x: %b" % bytes(size).replace(b"\0", b"y"))
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    made.connection_lost(None)
    await asyncio.gather(*made.tasks)
