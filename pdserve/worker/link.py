"""A worker's streams to its routers: dialled, kept, dialled again.

One task owns each router. What a router says goes to the inbox; what the core reports waits in a bounded queue, and a
router that does not read is dropped, with everything it asked for.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1 import link_pb2_grpc
from pdserve.rpc import INTERNAL_MESSAGE_BYTES, channel_options, secret_metadata
from pdserve.worker.words import RouterRef

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # messages to one router
WELCOME_TIMEOUT_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class FromRouter:
    router: RouterRef
    message: link.AttachResponse


@dataclass(frozen=True, slots=True)
class RouterGone:
    router: RouterRef


Sink = Callable[[FromRouter | RouterGone], Awaitable[None]]


class Links:
    """All of a worker's routers."""

    def __init__(self, addresses: tuple[str, ...], secret: bytes, register: link.Register, sink: Sink) -> None:
        self._addresses = addresses
        self._metadata = secret_metadata(secret)
        self._register = register
        self._sink = sink
        self._outbound: dict[RouterRef, asyncio.Queue[link.AttachRequest | None]] = {}
        self._last_ref = 0

    def update(self, register: link.Register) -> None:
        """Say anew who this worker is, to routers attached now and later."""
        self._register = register
        self.broadcast(link.AttachRequest(register=register))

    def broadcast(self, message: link.AttachRequest) -> None:
        for router in tuple(self._outbound):
            self.send(router, message)

    def send(self, router: RouterRef, message: link.AttachRequest) -> None:
        """Queue a message; nothing happens for a router that is gone. A full queue ends its stream."""
        queue = self._outbound.get(router)
        if queue is None:
            return
        if queue.qsize() >= MAX_QUEUED:
            logger.error("router %d does not read: %d messages wait", router, queue.qsize())
            del self._outbound[router]
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
            return
        queue.put_nowait(message)

    async def run(self) -> None:
        """Keep a stream to every router, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._keep(address), name=f"link {address}")

    async def _keep(self, address: str) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            self._last_ref += 1
            router = RouterRef(self._last_ref)
            try:
                await self._attach(address, router)
            except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
                logger.warning("router %s: %s", address, _reason(error))
            finally:
                attached = self._outbound.pop(router, None) is not None
            if attached:
                backoff_s = MIN_BACKOFF_S
            await self._sink(RouterGone(router))
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _attach(self, address: str, router: RouterRef) -> None:
        async with grpc.aio.insecure_channel(address, options=channel_options(INTERNAL_MESSAGE_BYTES)) as channel:
            stub = link_pb2_grpc.LinkServiceStub(channel)
            call = stub.Attach(metadata=self._metadata, wait_for_ready=False)
            try:
                await call.write(link.AttachRequest(register=self._register))
                async with asyncio.timeout(WELCOME_TIMEOUT_S):
                    first = await call.read()
                if first is grpc.aio.EOF or first.WhichOneof("message") != "welcome":
                    logger.warning("router %s did not welcome this worker", address)
                    return
                logger.info("attached to router %s at %s", first.welcome.router_id, address)
                queue: asyncio.Queue[link.AttachRequest | None] = asyncio.Queue()
                self._outbound[router] = queue
                self.send(router, link.AttachRequest(register=self._register))
                writer = asyncio.create_task(_write(call, queue), name=f"link {address} writer")
                try:
                    await self._read(call, router)
                finally:
                    writer.cancel()
                    await asyncio.wait([writer])
            finally:
                call.cancel()

    async def _read(
        self, call: grpc.aio.StreamStreamCall[link.AttachRequest, link.AttachResponse], router: RouterRef
    ) -> None:
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                return
            await self._sink(FromRouter(router, message))


async def _write(
    call: grpc.aio.StreamStreamCall[link.AttachRequest, link.AttachResponse],
    queue: asyncio.Queue[link.AttachRequest | None],
) -> None:
    while True:
        message = await queue.get()
        if message is None:
            call.cancel()
            return
        try:
            await call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end and says why


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return type(error).__name__
