"""Routers that start late, over real streams: they know what is cached, and the worker's other messages do not wait."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
from link_endpoints import SECRET, listening
from stream_ends import Heard

from pdserve.base.clock import MonotonicClock
from pdserve.engine.kvcache import KvCache, Prefix
from pdserve.net.credentials import Credentials
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.link_pb2_grpc import LinkServiceServicer
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import layout_to_proto
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import EVERYONE, HASH_BYTES, PrefixHasher
from pdserve.router.config import Limits
from pdserve.router.placement.policies import least_loaded
from pdserve.router.placement.predict import Predictor
from pdserve.router.placement.prefix_index import block_hashes
from pdserve.router.requests.core import RouterCore
from pdserve.router.shell import Links as WorkerEndpoint
from pdserve.router.shell import Shell
from pdserve.worker.kv_feed import KvFeed
from pdserve.worker.link import Links
from pdserve.worker.messages import Event

HASHER = PrefixHasher(SECRET, "m")
PAGE_SIZE, NUM_PAGES, MAX_PAGES = 16, 8192, 256  # in the cache, and in a message
LAYOUT = KvLayout("w", 1, 1, 8, PAGE_SIZE, "float32")
REGISTER = link.Register(
    worker_id="p0",
    incarnation=7,
    role=link.ROLE_PREFILL,
    ready=True,
    model="m",
    layout=layout_to_proto(LAYOUT),
    num_pages=NUM_PAGES,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    max_model_len=4096,
)
HEARTBEAT = link.AttachRequest(heartbeat=link.Heartbeat(pages_free=NUM_PAGES))


class Worker:
    """A worker's cache, feed and links; it computes nothing."""

    def __init__(self, addresses: list[str]) -> None:
        self.num_dialled = 0
        self._heard = Heard[Event]()
        self.kv = KvCache(NUM_PAGES, Paging.of(PAGE_SIZE), HASHER)
        self.links = Links(tuple(addresses), Credentials(SECRET), REGISTER, self._heard, print)
        self.feed = KvFeed(self.kv, self.links, max_pages=MAX_PAGES)

    async def until_dialled(self, count: int) -> None:
        while self.num_dialled < count:
            await self._heard.next()
            self.num_dialled += 1

    def serve(self, token_ids: list[int]) -> None:
        pages = self.kv.take(self.kv.paging.num_pages(len(token_ids))) or ()
        self.kv.publish(Prefix(token_ids, EVERYONE), PageTables((list(pages),)), range(len(pages)))
        self.kv.pool.release(pages)

    async def run(self) -> None:
        """Dial, and tell of the cache at each beat, as a worker's loop does."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.links.run())
            while True:
                self.feed.flush()
                self.links.broadcast(HEARTBEAT)
                await asyncio.sleep(0.1)


class Router:
    """The workers' endpoint of a router."""

    def __init__(self, name: str) -> None:
        self.shell = Shell(RouterCore("m", Limits(), least_loaded, Predictor(hasher=HASHER)), MonotonicClock())
        self.endpoint = WorkerEndpoint(self.shell, link.Welcome(router_id=name, wants_kv_events=True))

    async def until_known(self, token_ids: list[int]) -> None:
        """Wait until this router knows that a worker holds a prompt."""
        hashes, prefixes = block_hashes(HASHER, token_ids, EVERYONE), self.shell.core.predictor.prefixes
        await self.shell.until(lambda: max(prefixes.match(hashes, 1e9).values(), default=0) >= len(token_ids))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def prompt(number: int) -> list[int]:
    return [number] * 1024


async def test_every_router_that_starts_late_knows_all_that_is_cached_and_then_what_follows() -> None:
    num_prompts, ports = NUM_PAGES * PAGE_SIZE // 1024, free_ports(4)
    worker = Worker([f"127.0.0.1:{port}" for port in ports])
    for number in range(num_prompts):
        worker.serve(prompt(number))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            await worker.until_dialled(4 * 6)  # in vain: it waits between attempts for as long as it ever does
            routers = [Router(f"r{number}") for number in range(4)]
            for router, port in zip(routers, ports, strict=True):
                await stack.enter_async_context(listening(router.endpoint, port))
            for router in routers:
                for number in range(num_prompts):
                    await router.until_known(prompt(number))
            worker.serve(prompt(num_prompts))
            for router in routers:
                await router.until_known(prompt(num_prompts))
    finally:
        running.cancel()
        await asyncio.wait([running])


class Recording(LinkServiceServicer):
    """A router that notes the kinds of messages, in their order."""

    def __init__(self) -> None:
        self.kinds: list[str | None] = []
        self.num_pages = 0
        self.attached, self.heard_all = asyncio.Event(), asyncio.Event()

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[link.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        await anext(request_iterator)
        await context.write(link.AttachResponse(welcome=link.Welcome(router_id="r", wants_kv_events=True)))
        async for first in request_iterator:
            self.attached.set()
            for message in (first, *first.more):
                self._note(message)

    def _note(self, message: link.AttachRequest) -> None:
        self.kinds.append(message.WhichOneof("message"))
        if message.HasField("kv_events"):
            self.num_pages += len(message.kv_events.stored) // HASH_BYTES
            if self.num_pages == NUM_PAGES:
                self.heard_all.set()


async def test_what_a_worker_has_to_say_does_not_wait_for_a_snapshot() -> None:
    (port,) = free_ports(1)
    worker, router = Worker([f"127.0.0.1:{port}"]), Recording()
    for number in range(NUM_PAGES * PAGE_SIZE // 1024):
        worker.serve(prompt(number))
    running = asyncio.create_task(worker.links.run())
    try:
        async with asyncio.timeout(20), listening(router, port):
            await router.attached.wait()
            worker.feed.flush()
            worker.links.broadcast(HEARTBEAT)
            await router.heard_all.wait()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert router.kinds.count("kv_events") > 20
    assert router.kinds.index("heartbeat") <= 2  # after the registration, and a part of the snapshot
