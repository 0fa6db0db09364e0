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

from pdserve.clock import process_age_s
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1 import link_pb2_grpc
from pdserve.rpc import DISMISSED_STATUS, INTERNAL_MESSAGE_BYTES, channel_options, identify
from pdserve.worker.messages import RouterRef

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # messages to one router
WELCOME_TIMEOUT_S = 5.0
ATTACH = "/pdserve.v1.LinkService/Attach"
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.5  # a router that starts has its workers within half a second


@dataclass(frozen=True, slots=True)
class FromRouter:
    router: RouterRef
    message: link.AttachResponse


@dataclass(frozen=True, slots=True)
class RouterGone:
    router: RouterRef


Deferred = Callable[[], link.AttachRequest | None]  # puts a message together when it is its turn; None: there is none
Message = link.AttachRequest | Deferred
Call = grpc.aio.StreamStreamCall[link.AttachRequest, link.AttachResponse]
Sink = Callable[[FromRouter | RouterGone], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Stream:
    """One attached router. None in the queue: say nothing more."""

    call: Call
    queue: asyncio.Queue[Message | None]
    wants_kv_events: bool = False


class Links:
    """All of a worker's routers."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        secret: bytes,
        register: link.Register,
        sink: Sink,
        on_dismissed: Callable[[str], None],
    ) -> None:
        """`on_dismissed` is told why a router says that this process must end; it is dialled no more."""
        self._addresses = addresses
        self._secret = secret
        self._register = register
        self._sink = sink
        self._on_dismissed = on_dismissed
        self._streams: dict[RouterRef, Stream] = {}
        self._keepers: dict[asyncio.Task[None], RouterRef] = {}  # what each keeps, or dials
        self._last_ref = 0
        self._closing = False

    @property
    def attached(self) -> tuple[RouterRef, ...]:
        return tuple(self._streams)

    @property
    def wanting_kv_events(self) -> tuple[RouterRef, ...]:
        return tuple(router for router, stream in self._streams.items() if stream.wants_kv_events)

    def update(self, register: link.Register) -> None:
        """Say anew who this worker is, to routers attached now and later."""
        self._register = register
        self.broadcast(self._registration())

    def broadcast(self, message: link.AttachRequest) -> None:
        for router in self.attached:
            self.send(router, message)

    def send(self, router: RouterRef, message: Message) -> None:
        """Queue a message; nothing happens for a router that is gone. A full queue ends its stream."""
        stream = self._streams.get(router)
        if stream is None:
            return
        if stream.queue.qsize() >= MAX_QUEUED:
            logger.error("router %d does not read: %d messages wait", router, stream.queue.qsize())
            del self._streams[router]
            stream.call.cancel()
            return
        stream.queue.put_nowait(message)

    def finish(self) -> None:
        """Say what is queued, then end every stream, and dial no more; `run` returns when routers have heard it."""
        self._closing = True
        for stream in self._streams.values():
            stream.queue.put_nowait(None)
        for keeper, router in self._keepers.items():
            if router not in self._streams:
                keeper.cancel()

    async def run(self) -> None:
        """Keep a stream to every router, until finished or cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._keep(address), name=f"link {address}")

    def _registration(self) -> link.AttachRequest:
        """Return who this worker is, and how long it has been there by now."""
        self._register.age_ms = round(1000 * process_age_s())
        return link.AttachRequest(register=self._register)

    async def _keep(self, address: str) -> None:
        backoff_s, keeper, complaint = MIN_BACKOFF_S, asyncio.current_task(), ""
        while not self._closing:
            self._last_ref += 1
            router = RouterRef(self._last_ref)
            if keeper is not None:
                self._keepers[keeper] = router
            try:
                await self._attach(address, router)
                backoff_s, complaint = MIN_BACKOFF_S, ""
            except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
                level = logging.DEBUG if _reason(error) == complaint else logging.WARNING
                complaint = _reason(error)
                logger.log(level, "router %s: %s", address, complaint)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is DISMISSED_STATUS:
                    self._on_dismissed(f"router {address} refuses this process: {error.details()}")
                    return
                if keeper is not None and keeper.cancelling():
                    raise asyncio.CancelledError from error  # gRPC has put the call's end in its place
            finally:
                self._streams.pop(router, None)
            await self._sink(RouterGone(router))
            if not self._closing:
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _attach(self, address: str, router: RouterRef) -> None:
        """Serve one stream to its end."""
        async with grpc.aio.insecure_channel(address, options=channel_options(INTERNAL_MESSAGE_BYTES)) as channel:
            call: Call | None = None
            try:
                async with asyncio.timeout(WELCOME_TIMEOUT_S):
                    proof = await identify(channel, self._secret, ATTACH)
                    call = link_pb2_grpc.LinkServiceStub(channel).Attach(metadata=proof)
                    await call.write(self._registration())
                    first = await call.read()
                if not isinstance(first, link.AttachResponse) or not first.HasField("welcome"):
                    raise TimeoutError(f"router {address} ended the stream without a welcome")
                logger.info("attached to router %s at %s", first.welcome.router_id, address)
                stream = Stream(call, asyncio.Queue(), first.welcome.wants_kv_events)
                self._streams[router] = stream
                self.send(router, self._registration())
                writer = asyncio.create_task(_write(stream), name=f"link {address} writer")
                try:
                    await self._read(call, router)
                finally:
                    writer.cancel()
                    await asyncio.wait([writer])
            finally:
                if call is not None:
                    call.cancel()

    async def _read(self, call: Call, router: RouterRef) -> None:
        task = asyncio.current_task()
        while True:
            try:
                message = await call.read()
            except asyncio.CancelledError:
                if task is None or task.cancelling():
                    raise
                return  # only the call was cancelled: `send` has dropped the router
            if not isinstance(message, link.AttachResponse):
                return  # the end of the stream
            await self._sink(FromRouter(router, message))


async def _write(stream: Stream) -> None:
    while True:
        message = await stream.queue.get()
        try:
            if message is None:
                await stream.call.done_writing()
                return
            if not isinstance(message, link.AttachRequest):
                message = message()
            if message is not None:
                await stream.call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end and says why


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return type(error).__name__
