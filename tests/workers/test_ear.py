"""What a worker hears from routers, while bytes of others wait unread in a socket of its process."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from pdserve.clock import FakeClock
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer.session import Peer
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.link import FromRouter
from pdserve.worker.loop import Inbox
from pdserve.worker.process import Ear, FromRouterEvent
from pdserve.worker.words import Cancelled, PeerGone, RouterRef

ROUTER = RouterRef(1)
GONE = link.AttachResponse(process_gone=link.ProcessGone(worker_id="p0", incarnation=7))
CANCEL = link.AttachResponse(cancel=link.Cancel(request_id=bytes(16), attempt=3))
END = PeerGone(Peer(WorkerId("p0"), Incarnation(7)))
CANCELLED = Cancelled(RequestId(bytes(16)), Attempt(3))


@pytest.fixture
def unread() -> Iterator[socket.socket]:
    """The end of a connection at which four bytes wait."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as reader,
    ):
        sender.sendall(b"late")
        reader.recv(1, socket.MSG_PEEK)  # they have arrived
        yield reader


async def test_an_end_waits_for_what_is_unread_and_keeps_nothing_else_waiting(unread: socket.socket) -> None:
    inbox = Inbox[FromRouterEvent]()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        ear = Ear(inbox, FakeClock(), tasks)
        await ear.hear(FromRouter(ROUTER, GONE))
        await ear.hear(FromRouter(ROUTER, CANCEL))
        await inbox.wait()
        assert inbox.drain() == [CANCELLED]
        assert unread.recv(4) == b"late"
        await inbox.wait()
        assert inbox.drain() == [END]


async def test_a_worker_that_leaves_waits_for_no_end(unread: socket.socket) -> None:
    inbox = Inbox[FromRouterEvent]()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        ear = Ear(inbox, FakeClock(), tasks)
        await ear.hear(FromRouter(ROUTER, GONE))
        ear.close()
    assert inbox.drain() == []
