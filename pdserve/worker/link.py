"""A worker's streams to its routers, around an `attaching.Attaching`.

A router's messages go to the inbox; what the core reports waits in a bounded queue, and a router that does not read
is dropped, with everything it asked for.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from pdserve.base.clock import MonotonicClock, process_age_s
from pdserve.base.errors import ProtocolError
from pdserve.kvtransfer.doors import Sink
from pdserve.net.certificates import Part
from pdserve.net.coalescing import Deferred, write_all
from pdserve.net.credentials import Credentials
from pdserve.net.dns import Lookups, Resolve, resolve
from pdserve.net.rpc import DISMISSED_STATUS, identify
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1 import link_pb2_grpc
from pdserve.worker import attaching, wire
from pdserve.worker.attaching import WELCOME_TIMEOUT_S, Attaching, Dial
from pdserve.worker.messages import Event, RouterLost, RouterRef

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # messages to one router
MAX_WARNED = 64  # addresses, before all is logged once more
ATTACH = "/pdserve.v1.LinkService/Attach"


Message = link.AttachRequest | Deferred[link.AttachRequest]
Call = grpc.aio.StreamStreamCall[link.AttachRequest, link.AttachResponse]


@dataclass(slots=True, eq=False)
class _Stream:
    task: asyncio.Task[None]
    outbound: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)  # None: write nothing more
    welcome: link.Welcome = field(default_factory=link.Welcome)


class Links:
    def __init__(
        self,
        names: tuple[str, ...],
        credentials: Credentials,
        register: link.Register,
        sink: Sink[Event],
        on_dismissed: Callable[[str], None],
        own: str = "",
    ) -> None:
        """`names`: host:port each, ConfigError where one is not. `own`: that of this process's own router, if any.

        `on_dismissed` gets the reason if a router refuses this process, which must end; that router is dialled no more.
        """
        self._own = own
        names = (*names, own) if own else names
        self._lookups = Lookups(names, "routers", self._note_addresses)
        self._credentials = credentials
        self._register = register
        self._sink = sink
        self._on_dismissed = on_dismissed
        self._clock = MonotonicClock()
        self._attaching = Attaching(jitter=lambda: random.uniform(0.5, 1.0))
        self._streams: dict[RouterRef, _Stream] = {}
        self._warned: dict[str, str] = {}  # what was wrong with a router last, by its address
        self._tasks = asyncio.TaskGroup()
        self._looking: asyncio.Task[None] | None = None

    @property
    def attached(self) -> tuple[RouterRef, ...]:
        return self._attaching.attached

    @property
    def wanting_kv_events(self) -> tuple[RouterRef, ...]:
        return tuple(router for router in self.attached if self._streams[router].welcome.wants_kv_events)

    def wants_each_step(self, router: RouterRef) -> bool:
        """Whether a router wants a report of each step at once; False for one that is gone."""
        stream = self._streams.get(router)
        return stream is not None and stream.welcome.wants_each_step

    def update(self) -> None:
        """Register again: the registration that was given to this object has changed."""
        self.broadcast(self._registration())

    def take_role(self, role: "link.Role.ValueType", epoch: int, step_tokens: int) -> None:
        """Register again with a role that this worker has taken."""
        self._register.role, self._register.role_epoch = role, epoch
        self._register.max_num_batched_tokens = step_tokens
        self.update()

    def broadcast(self, message: link.AttachRequest) -> None:
        for router in self.attached:
            self.send(router, message)

    def send(self, router: RouterRef, message: Message | None) -> None:
        """Queue a message; nothing happens for a router that is gone. A full queue ends its stream."""
        stream = self._streams.get(router)
        if stream is None:
            return
        if stream.outbound.qsize() >= MAX_QUEUED:
            reason = f"it does not read: {stream.outbound.qsize()} messages wait"
            logger.error("router %d: %s", router, reason)
            self._perform(self._attaching.end(router))
            return
        stream.outbound.put_nowait(message)

    def finish(self) -> None:
        """Write what is queued, then end every stream, and dial no more; `run` returns when routers have read it."""
        self._perform(self._attaching.leave())
        if self._looking is not None:
            self._looking.cancel()

    async def run(self, resolve: Resolve = resolve) -> None:
        """Keep a stream to every router, until finished or cancelled."""
        async with self._tasks:
            self._looking = self._tasks.create_task(self._lookups.run(resolve), name="names of routers")

    def _note_addresses(self, name: str, addresses: frozenset[str]) -> None:
        self._perform(self._attaching.note_addresses(name, addresses))

    def _perform(self, commands: Iterable[attaching.Command]) -> None:
        for command in commands:
            match command:
                case Dial(router, address):
                    task = self._tasks.create_task(self._serve(command), name=f"link {address}")
                    self._streams[router] = _Stream(task)
                    asyncio.get_running_loop().call_later(WELCOME_TIMEOUT_S, self._time_out, command)
                case attaching.Redial(address, delay_s):
                    self._lookups.again()
                    self._tasks.create_task(self._redial(address, delay_s), name=f"link {address}")
                case attaching.Finish(router):
                    self.send(router, None)
                case attaching.Close(router):
                    self._streams.pop(router).task.cancel()
                case RouterLost():
                    self._sink.put(command)

    def _registration(self) -> link.AttachRequest:
        """Return who this worker is, and how long it has been there by now."""
        self._register.age_ms = round(1000 * process_age_s())
        return link.AttachRequest(register=self._register)

    async def _redial(self, address: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._perform(self._attaching.dial(address))

    def _time_out(self, dial: Dial) -> None:
        if dial.router in self._streams and dial.router not in self.attached:
            self._warn(dial.address, f"no welcome within {WELCOME_TIMEOUT_S:g} s")
        self._perform(self._attaching.time_out(dial.router))

    async def _serve(self, dial: Dial) -> None:
        stream = self._streams[dial.router]
        try:
            await self._attach(dial, stream)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            if stream.task.cancelling():
                raise asyncio.CancelledError from error  # gRPC raises the call's end in place of the cancellation
            reason = type(error).__name__
            if isinstance(error, grpc.aio.AioRpcError):
                if error.code() is DISMISSED_STATUS:
                    self._dismiss(dial, error.details() or "")
                    return
                reason = f"{error.code().name}: {error.details()}"
            self._warn(dial.address, reason)
        self._perform(self._attaching.end(dial.router))

    def _dismiss(self, dial: Dial, reason: str) -> None:
        self._warn(dial.address, reason)
        self._perform(self._attaching.dismiss(dial.router))
        self._on_dismissed(f"router {dial.address} refuses this process: {reason}")

    async def _attach(self, dial: Dial, stream: _Stream) -> None:
        credentials = Credentials(self._credentials.secret) if dial.address == self._own else self._credentials
        async with credentials.channel(dial.address, Part.ROUTER) as channel:
            proof = await identify(channel, self._credentials.secret, ATTACH)
            call: Call = link_pb2_grpc.LinkServiceStub(channel).Attach(metadata=proof)
            try:
                await call.write(self._registration())
                first = await call.read()
                if not isinstance(first, link.AttachResponse) or not first.HasField("welcome"):
                    self._warn(dial.address, "it ended the stream without a welcome")
                    return
                logger.info("attached to router %s at %s", first.welcome.router_id, dial.address)
                self._warned.pop(dial.address, None)
                stream.welcome = first.welcome
                if self._attaching.attach(dial.router):  # what it was sent when it was dialled may have changed
                    self.send(dial.router, self._registration())
                writer = asyncio.create_task(write_all(stream.outbound, call), name=f"link {dial.address} writer")
                try:
                    while isinstance(message := await call.read(), link.AttachResponse):
                        for each in (message, *message.more):
                            await self._take(dial.router, each)
                finally:
                    writer.cancel()
                    await asyncio.wait([writer])
            finally:
                call.cancel()

    async def _take(self, router: RouterRef, message: link.AttachResponse) -> None:
        """Hand on what a router asks for. What is malformed is dropped."""
        try:
            event = wire.event(message, router, self._clock.now_s())
        except ProtocolError as error:
            logger.warning("router %d: refused: %s", router, error)
            return
        if event is not None:
            await self._sink.offer(event)

    def _warn(self, address: str, problem: str) -> None:
        """Log what is wrong with a router: as a warning the first time, and at level DEBUG while it stays the same."""
        if len(self._warned) >= MAX_WARNED:
            self._warned.clear()
        level = logging.DEBUG if self._warned.get(address) == problem else logging.WARNING
        self._warned[address] = problem
        logger.log(level, "router %s: %s", address, problem)
