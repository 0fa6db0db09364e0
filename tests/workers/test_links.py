"""A worker's streams to routers, with a router that welcomes everybody."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from link_endpoints import SECRET, listening
from stream_ends import Heard

from pdserve.net.credentials import Credentials
from pdserve.net.rpc import DISMISSED_STATUS
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.link_pb2_grpc import LinkServiceServicer
from pdserve.worker.link import MAX_QUEUED, Links
from pdserve.worker.messages import Cancelled, DrainAsked, Event, RouterLost

HEARTBEAT = link.AttachRequest(heartbeat=link.Heartbeat())


def not_dismissed(why: str) -> None:
    raise AssertionError(why)


class Welcoming(LinkServiceServicer):
    """Notes who registers, and says one word to each."""

    def __init__(self, word: link.AttachResponse) -> None:
        self.word = word
        self.registered: asyncio.Queue[str] = asyncio.Queue()
        self.roles: asyncio.Queue[tuple[int, int]] = asyncio.Queue()  # and epochs, of further registrations

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[link.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(request_iterator)
        await context.write(link.AttachResponse(welcome=link.Welcome(router_id="r")))
        await context.write(self.word)
        self.registered.put_nowait(first.register.worker_id)
        async for first in request_iterator:
            for message in (first, *first.more):
                if message.HasField("register"):
                    self.roles.put_nowait((message.register.role, message.register.role_epoch))


@asynccontextmanager
async def attached(
    word: link.AttachResponse = link.AttachResponse(drain=link.Drain()),  # noqa: B008 - nobody changes it
) -> AsyncIterator[tuple[Welcoming, Links, Heard[Event]]]:
    router, heard = Welcoming(word), Heard[Event]()
    async with listening(router) as address:
        links = Links((address,), Credentials(SECRET), link.Register(worker_id="d0"), heard, not_dismissed)
        running = asyncio.create_task(links.run())
        try:
            async with asyncio.timeout(20):
                yield router, links, heard
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_messages_that_come_together_are_heard_in_their_order() -> None:
    others = [link.AttachResponse(cancel=link.Cancel(request_id=bytes([number]) * 16)) for number in range(2)]
    async with attached(link.AttachResponse(drain=link.Drain(), more=others)) as (_, _, heard):
        assert await heard.next() == DrainAsked()
        found = [await heard.next() for _ in others]
        assert [event.request_id[0] for event in found if isinstance(event, Cancelled)] == [0, 1]


async def test_a_router_that_does_not_read_is_dropped_and_dialled_again() -> None:
    async with attached() as (router, links, heard):
        assert await heard.next() == DrainAsked()
        (first,) = links.attached
        for _ in range(MAX_QUEUED + 1):  # at once: nothing is written meanwhile
            links.send(first, HEARTBEAT)
        assert links.attached == ()
        assert await heard.next() == RouterLost(first)
        assert await heard.next() == DrainAsked()
        assert links.attached != (first,)
        assert [await router.registered.get() for _ in range(2)] == ["d0", "d0"]


async def test_a_role_is_reported_at_once_and_to_routers_that_attach_later() -> None:
    async with attached() as (router, links, heard):
        assert await heard.next() == DrainAsked()
        (first,) = links.attached
        await router.roles.get()  # each worker says again who it is once it is welcomed
        links.take_role(link.ROLE_DECODE, 3, 512)
        assert await router.roles.get() == (link.ROLE_DECODE, 3)
        for _ in range(MAX_QUEUED + 1):  # it is dropped
            links.send(first, HEARTBEAT)
        assert await router.roles.get() == (link.ROLE_DECODE, 3)


async def test_a_worker_that_leaves_waits_for_no_router_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        addresses = (f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:1")
        heard = Heard[Event]()
        links = Links(addresses, Credentials(SECRET), link.Register(worker_id="d0"), heard, not_dismissed)
        running = asyncio.create_task(links.run())
        dialling, _ = await asyncio.to_thread(silent.accept)
        with dialling:
            links.finish()
            async with asyncio.timeout(3):  # less than a worker waits for a welcome
                await running


class Dismissing(LinkServiceServicer):
    """Sends everybody away, for good or for now."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status
        self.num_asked = asyncio.Semaphore(0)

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[link.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        await anext(request_iterator)
        self.num_asked.release()
        await context.abort(self._status, "there is a later one")


@asynccontextmanager
async def sent_away(status: grpc.StatusCode) -> AsyncIterator[tuple[Dismissing, Links, list[str]]]:
    router, why, heard = Dismissing(status), list[str](), Heard[Event]()
    async with listening(router) as address, asyncio.timeout(20):
        links = Links((address,), Credentials(SECRET), link.Register(worker_id="d0"), heard, why.append)
        yield router, links, why


async def test_a_worker_that_a_router_sends_away_for_good_hears_why_and_dials_it_no_more() -> None:
    async with sent_away(DISMISSED_STATUS) as (_, links, why):
        await links.run()  # returns: no router is left to dial
        assert [reason.partition(": ")[2] for reason in why] == ["there is a later one"]


async def test_a_worker_that_a_router_drops_for_now_dials_it_again() -> None:
    async with sent_away(grpc.StatusCode.FAILED_PRECONDITION) as (router, links, why):
        running = asyncio.create_task(links.run())
        for _ in range(2):
            await router.num_asked.acquire()
        running.cancel()
        await asyncio.wait([running])
        assert why == []
