"""What a worker's core is told by routers and peers, while bytes of others wait unread in a socket of its process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import connections
import numpy as np
import pytest
from half_slice import MEETING, half_slice
from loopback import loopback_mover

from pdserve.base.ids import Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.doors import PeerGone, SenderAlive
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import ByteRows, Region
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker import wire
from pdserve.worker.inbox import Inbox, Listener
from pdserve.worker.messages import Cancelled, Event, RouterRef

ROUTER = RouterRef(1)
GONE = link.AttachResponse(process_gone=link.ProcessGone(worker_id="p0", incarnation=7))
CANCEL = link.AttachResponse(cancel=link.Cancel(request_id=bytes(16), attempt=3))
END = PeerGone(Peer(WorkerId("p0"), Incarnation(7)))
CANCELLED = Cancelled(RequestId(bytes(16)), Attempt(3))


def asked(message: link.AttachResponse) -> Event:
    """Return what a link makes of a router's message."""
    event = wire.event(message, ROUTER, 0.0)
    assert event is not None
    return event


@pytest.fixture
def unread() -> Iterator[socket.socket]:
    with connections.unread() as reader:
        yield reader


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = loopback_mover(Region.of(np.zeros((2, 8), np.uint8)), lambda _: None)
    yield mover
    mover.close()


@asynccontextmanager
async def guarding(mover: Mover) -> AsyncIterator[tuple[Inbox, Listener]]:
    """Yield a worker's inbox, and who listens; return when nothing is waited for any more."""
    inbox = Inbox()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        listener = Listener(inbox, tasks)
        listener.guard(mover)
        yield inbox, listener


async def test_an_end_waits_for_what_is_unread_and_keeps_nothing_else_waiting(
    unread: socket.socket, mover: Mover
) -> None:
    async with guarding(mover) as (inbox, listener):
        await listener.offer(asked(GONE))
        await listener.offer(asked(CANCEL))
        await inbox.wait()
        assert inbox.drain() == [CANCELLED]
        assert unread.recv(4) == b"late"
        await inbox.wait()
        assert inbox.drain() == [END]


@pytest.fixture
def view() -> ByteRows:
    return np.zeros((2, 1 << 16), np.uint8)


@pytest.fixture
def staged(view: ByteRows) -> Iterator[Mover]:
    me = Peer(WorkerId("d0"), Incarnation(1))
    mover = Mover(CollectiveBackend(me, Region.of(view), MEETING, staged=True), lambda _: None)
    yield mover
    mover.close()


async def test_an_end_waits_until_nothing_that_was_read_of_the_process_can_reach_a_page(
    staged: Mover, view: ByteRows
) -> None:
    with half_slice(staged.describe(), END.peer) as ended:
        async with guarding(staged) as (inbox, listener):
            await listener.offer(asked(GONE))
            await inbox.wait()
        assert inbox.drain() == [END]
        assert not ended.send_rest()
    assert not view.any()


async def test_so_does_the_end_of_a_sender_whose_successor_has_attached(staged: Mover, view: ByteRows) -> None:
    with half_slice(staged.describe(), END.peer) as ended:
        async with guarding(staged) as (inbox, listener):
            listener.put(END)
            listener.put(SenderAlive(END.peer))
            assert inbox.drain() == [SenderAlive(END.peer)]
            await inbox.wait()
        assert inbox.drain() == [END]
        assert not ended.send_rest()
    assert not view.any()


async def test_a_worker_that_leaves_waits_for_no_end(unread: socket.socket, mover: Mover) -> None:
    async with guarding(mover) as (inbox, listener):
        await listener.offer(asked(GONE))
        listener.close()
    assert inbox.drain() == []


async def test_a_worker_that_leaves_waits_for_no_end_that_a_stream_reports_later(
    unread: socket.socket, mover: Mover
) -> None:
    async with guarding(mover) as (inbox, listener):
        listener.close()
        listener.put(END)
    assert inbox.drain() == []
