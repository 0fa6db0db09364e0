import asyncio
import socket
from collections.abc import Iterator

import pytest
from connections import connection, unread

from pdserve.kvtransfer.speed import until_read


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with connection() as both:
        yield both


async def test_with_nothing_unread_nothing_is_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    async with asyncio.timeout(5):
        await until_read()


@pytest.mark.parametrize("sender_lives", [True, False])
async def test_what_a_sender_left_behind_is_waited_for_until_it_is_read(
    ends: tuple[socket.socket, socket.socket], sender_lives: bool
) -> None:
    sender, reader = ends
    sender.sendall(b"late")
    if not sender_lives:
        sender.close()
    reader.recv(1, socket.MSG_PEEK)  # it has arrived
    waiting = asyncio.create_task(until_read())
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    assert reader.recv(4) == b"late"
    async with asyncio.timeout(5):
        await waiting


async def test_a_socket_that_is_closed_unread_is_not_waited_for() -> None:
    with unread() as reader:
        waiting = asyncio.create_task(until_read())
        await asyncio.sleep(0)
        reader.close()
        async with asyncio.timeout(5):
            await waiting


async def test_what_comes_later_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, reader = ends
    sender.sendall(b"before")
    reader.recv(1, socket.MSG_PEEK)
    waiting = asyncio.create_task(until_read())
    await asyncio.sleep(0)
    sender.sendall(b"after it")
    assert reader.recv(6, socket.MSG_WAITALL) == b"before"
    reader.recv(1, socket.MSG_PEEK)
    async with asyncio.timeout(5):
        await waiting
