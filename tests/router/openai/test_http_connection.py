"""One connection's own bounds, on a transport that is played."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.connection import MAX_HEAD_BYTES, Connection
from pdserve.router.frontend.openai.dialect import CHAT, Choice, Prompt, Response, Shown
from pdserve.router.frontend.openai.reply import Stream


class Played(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:  # noqa: ANN401 - asyncio's
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _serve_nothing(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def _leave(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
    """Leave the response to others."""


def connected(transport: Played, app: Any = _serve_nothing) -> Connection:  # noqa: ANN401 - ASGI's
    config = uvicorn.Config(app, lifespan="off", ws="none", interface="asgi3", log_config=None)
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


@pytest.mark.parametrize("asked", [b"", b"connection: close\r\n"])
async def test_a_streams_end_ends_a_connection_that_is_not_kept(asked: bytes) -> None:
    transport = Played()
    made = connected(transport, _leave)
    made.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % asked)
    assert made.write_part(made.cycle, b"HTTP/1.1 200 OK\r\n", b"a", is_last=False)
    assert transport.written == b"HTTP/1.1 200 OK\r\n%btransfer-encoding: chunked\r\n\r\n1\r\na\r\n" % asked
    made.shutdown()
    assert not transport.is_closed
    made.write_part(made.cycle, b"", b"b", is_last=True)
    assert transport.written.endswith(b"\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
    assert transport.is_closed
    made.connection_lost(None)
    await asyncio.gather(*made.tasks)


class Full:
    """Stands for a connection that takes no more at once."""

    reply: Any = None
    transport = Played()
    num_parts = 0

    def write_part(self, *part: object, is_last: bool) -> bool:
        del part, is_last
        self.num_parts += 1
        return False


class Waiting:
    """Stands for an answer that goes on when it may."""

    num_resumed = 0

    def resume(self) -> None:
        self.num_resumed += 1


async def test_a_stream_whose_first_write_fills_its_connection_waits_for_it() -> None:
    full, waiting = Full(), Waiting()
    made: Any = full, SimpleNamespace(response_started=False), Response(CHAT, "m", Mock(), Shown())
    stream = Stream(*made, [], [[Choice(0, Prompt())]], begins_at_once=False)
    part: Any = stream.parts[0]
    part.answer = waiting
    assert not stream.take(part, [Gain(0, [1], "x")])
    running = asyncio.create_task(stream.run(Mock()))
    await asyncio.sleep(0)
    assert (full.num_parts, waiting.num_resumed) == (1, 0)
    full.reply.resume()
    assert waiting.num_resumed == 1
    stream.lost()
    await running
    stream.close(Mock())
