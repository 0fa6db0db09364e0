"""The routers that a frontend has, and the requests that they have for it: the `Backend` of a frontend.

Invariant: each request that is admitted ends once, and its client gets each token once and in order, whichever routers
are lost meanwhile. One router at a time has a request. When that router is lost, another one gets the request, with the
tokens that the client has: which tokens follow depends on the seed and these alone.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import RequestId
from pdserve.net.credentials import Connections
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import CLIENT_GONE, Cause, Refused, RefusedError, reads_too_slowly
from pdserve.router.config import FrontendConfig
from pdserve.router.dispatcher import Answer
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.backend import Abort, EngineState, KeptCounts, Readiness, State
from pdserve.router.frontend.channel import Channel
from pdserve.router.frontend.counting import HomeOutcomes, HomeTenants
from pdserve.router.frontend.underway import Underway
from pdserve.router.requests.commands import Deliver, Finished
from pdserve.router.requests.events import ClientTooSlow, RequestArrived, StopStringFound

RETRY_AFTER_S = 2.0  # a supervised router serves again after about as long
_SHUTTING_DOWN = Refused(Cause.SHUTTING_DOWN, "this frontend is shutting down")
_NOT_YET = Readiness(is_live=True, is_ready=False, can_serve=False, max_model_len=None)


class RouterLink:
    def __init__(self, address: str, routers: "Routers") -> None:
        self.address = address
        self.readiness: Readiness | None = None  # None: it has said nothing yet
        self.channel = Channel(messages.core_decoder, self._take)
        self.replies: dict[int, asyncio.Future[bytes]] = {}  # that are still to come, by number
        self._routers = routers

    def _take(self, message: messages.FromCore) -> None:
        match message:
            case messages.ReadinessChanged(readiness):
                readiness.check_model(self._routers.model)
                self.readiness = readiness
                self._routers.look()
            case messages.Reply(number, data):
                reply = self.replies.pop(number, None)
                if reply is None:
                    raise ProtocolError(f"reply {number} was not asked for")
                if not reply.done():
                    reply.set_result(data)
            case messages.Ping():
                self.channel.post(self._routers.counts())
            case messages.Abort(tenant, names):
                for abort in self._routers.aborts:
                    abort(tenant, names)
            case _:
                self._routers.take(self, message)


class Routers:
    """Sends what endpoints ask to the router in use, its home, and delivers what routers answer."""

    def __init__(self, config: FrontendConfig, clock: Clock | None = None, model: str = "") -> None:
        self.clock = clock or MonotonicClock()
        self.tenants = HomeTenants(self)
        self.outcomes = HomeOutcomes(self)
        self.connections = Connections()
        self.aborts: list[Abort] = []
        self.kept = KeptCounts()
        self.span_counts: Callable[[], Mapping[str, int]] = dict
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by an error of ours
        self.changed: Callable[[], None] = lambda: None  # called when `readiness` may have changed
        self.metrics_address = ""  # host:port; empty: nowhere
        self.model = model  # a router of another model is refused; empty: none is
        self.is_draining = False
        self.num_resumed = 0  # requests that went from a lost router to another one
        self.home: RouterLink | None = None  # the router that gets requests
        self._config = config
        self._links: list[RouterLink] = []  # attached, in the order of their attaching
        self._underway: dict[RequestId, Underway] = {}
        self._num_asked = 0
        self._last = _NOT_YET  # of the last home
        self._lost_s = self.clock.now_s()  # since when there is no home
        self._has_home = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    # ---- links

    def attach(self, link: RouterLink) -> None:
        link.channel.post(messages.Attached(self._config.frontend_id, messages.PROTOCOL_VERSION, self.metrics_address))
        self._links.append(link)

    async def say_goodbye(self) -> None:
        """Tell all routers that this frontend stops; return once each has ended its stream."""
        for link in self._links:
            link.channel.post(messages.Goodbye())
        await asyncio.gather(*[link.channel.closed() for link in self._links])

    def lose(self, link: RouterLink) -> None:
        """Take the requests of a router whose stream has ended to another one."""
        self._links.remove(link)
        for reply in link.replies.values():
            reply.cancel()
        for each in [each for each in self._underway.values() if each.link is link]:
            each.link = None
            each.num_lost += 1
            if each.is_over is not None:
                self._end(each, each.is_over)
        self.look()

    def look(self) -> None:
        """Choose the home: the first router attached that is not shutting down. Send it what waits."""
        live = [link for link in self._links if link.readiness is not None and link.readiness.is_live]
        home = self.home if self.home in live else next(iter(live), None)
        if home is not self.home:
            self.home = home
            if home is None:
                self._lost_s = self.clock.now_s()
                self._has_home.clear()
            else:
                self._has_home.set()
                for tenant, count in self.tenants.begun.items():
                    home.channel.post(messages.Using(tenant, count))
        if home is not None and home.readiness is not None:
            self._last = home.readiness
        self._send_waiting()
        self.changed()

    def _send_waiting(self) -> None:
        waiting = [each for each in self._underway.values() if each.link is None]
        if self.home is None:
            self._set_alarm(waiting)
            return
        if waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send_all(), name="requests of a lost router")

    async def _send_all(self) -> None:
        """Send what waits to the home: not more at once than it reads."""
        while (home := self.home) is not None:
            each = next((each for each in self._underway.values() if each.link is None), None)
            if each is None:
                return
            self.num_resumed += each.num_lost > 0
            self._send(each, home)
            await home.channel.drain()

    def _send(self, each: Underway, link: RouterLink) -> None:
        each.link = link
        link.channel.post(each.arrival(self.clock.now_s()))

    def _set_alarm(self, waiting: Sequence[Underway]) -> None:
        """Have requests ended that wait too long."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if waiting:
            due_s = min(self._lost_s + self._config.router_grace_s, *(each.event.deadline_s for each in waiting))
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, due_s - self.clock.now_s()), self._end_late)

    def _end_late(self) -> None:
        now_s = self.clock.now_s()
        is_over = now_s >= self._lost_s + self._config.router_grace_s
        for each in [each for each in self._underway.values() if each.link is None]:
            if now_s >= each.event.deadline_s:
                self._end(each, Refused(Cause.DEADLINE, "the deadline passed while no router was attached"))
            elif is_over:
                self._end(each, self.no_router())
        self._send_waiting()

    def no_router(self) -> Refused:
        text = f"router_grace_s: no router has been attached for {self._config.router_grace_s:g} s"
        return Refused(Cause.NO_ROUTER, text, retry_after_s=RETRY_AFTER_S)

    # ---- what endpoints ask

    def readiness(self) -> Readiness:
        is_near = self.home is not None or self.clock.now_s() < self._lost_s + self._config.router_grace_s
        is_live, last = not self.is_draining, self._last
        serves = is_near and is_live
        return replace(last, is_live=is_live, is_ready=last.is_ready and serves, can_serve=last.can_serve and serves)

    @property
    def num_underway(self) -> int:
        return len(self._underway)

    async def idle(self) -> None:
        """Return once no request is under way."""
        while self._underway:
            self._idle.clear()
            await self._idle.wait()

    @property
    def num_waiting(self) -> int:
        """Requests that no router has."""
        return sum(each.link is None for each in self._underway.values())

    def submit(self, event: RequestArrived, answer: Answer) -> None:
        each = Underway(event, answer, [[] for _ in range(event.params.n)], set())
        self._underway[event.request_id] = each
        if self.home is not None:
            self._send(each, self.home)
        elif self.is_draining:
            self._end(each, _SHUTTING_DOWN)
        elif self.num_waiting > self._config.max_num_waiting:
            text = f"max_num_waiting: {self._config.max_num_waiting} requests wait for a router already"
            self._end(each, Refused(Cause.NO_ROUTER, text, retry_after_s=RETRY_AFTER_S))
        else:
            self._set_alarm([each for each in self._underway.values() if each.link is None])

    def leave(self, request_id: RequestId) -> None:
        each = self._underway.get(request_id)
        if each is None:
            return
        each.is_over = CLIENT_GONE
        if each.link is not None:
            each.link.channel.post(messages.Leave(request_id))
        else:
            self._end(each, each.is_over)

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def end_all(self) -> None:
        """End what is left: this frontend has drained for as long as it may."""
        for each in tuple(self._underway.values()):
            if each.link is not None:
                each.link.channel.post(messages.Leave(each.event.request_id))
            self._end(each, _SHUTTING_DOWN)

    async def live(self) -> State:
        return msgspec.msgpack.decode(await self._ask("live"), type=State)

    async def live_request(self, name: str) -> dict[str, Any] | None:
        return msgspec.msgpack.decode(await self._ask("request", name.encode()), type=dict[str, Any] | None)

    async def metrics(self) -> bytes:
        return await self._ask("metrics")

    async def engine(self) -> EngineState:
        return msgspec.msgpack.decode(await self._ask("engine"), type=EngineState)

    def abort(self, tenant: str, names: Sequence[str]) -> None:
        self.post(messages.Abort(tenant, names))

    def _ask(self, what: messages.What, data: bytes = b"") -> asyncio.Future[bytes]:
        if self.home is None:
            raise RefusedError(Refused(Cause.NO_ROUTER, "no router is attached to this frontend"))
        number, reply = self.new_reply(self.home)
        self.home.channel.post(messages.Ask(number, what, data))
        return reply

    def new_reply(self, link: RouterLink) -> tuple[int, asyncio.Future[bytes]]:
        """Return a number for a message that a router will reply to, and its reply; cancelled if the router is lost."""
        self._num_asked += 1
        reply = link.replies[self._num_asked] = asyncio.get_running_loop().create_future()
        return self._num_asked, reply

    def post(self, message: messages.Message) -> None:
        """Send a message to the home; it is dropped if there is none."""
        if self.home is not None:
            self.home.channel.post(message)

    async def wait_for_home(self) -> RouterLink | None:
        """Return the home, once there is one; None if there is none for too long."""
        while self.home is None:
            left_s = self._lost_s + self._config.router_grace_s - self.clock.now_s()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._has_home.wait()
            except TimeoutError:
                return None
        return self.home

    def link_of(self, request_id: RequestId) -> RouterLink | None:
        """Return the router that has a request, or had it to its end."""
        each = self._underway.get(request_id)
        return None if each is None else each.link

    def counts(self) -> messages.Pong:
        return messages.Pong(dict(self.span_counts()), self.connections.num_opened, self.connections.num_called)

    # ---- what routers answer

    def take(self, link: RouterLink, message: messages.FromCore) -> None:
        """Carry out what a router says of a request; ProtocolError for one that it does not have."""
        match message:
            case messages.Tokens():
                self._deliver(self._of(link, message.request_id), message)
            case messages.Ended(request_id, finished, refused):
                outcome = finished or refused
                if outcome is None:
                    raise ProtocolError("an end of a request says neither finished nor refused")
                self._end(self._of(link, request_id), outcome)
            case messages.Returned(request_id):
                each = self._of(link, request_id)
                each.link = None
                self._send_waiting()
            case _:
                raise ProtocolError(f"{type(message).__name__} is nothing that a router says of a request")

    def _of(self, link: RouterLink, request_id: RequestId) -> Underway:
        each = self._underway.get(request_id)
        if each is None or each.link is not link:
            raise ProtocolError(f"request {request_id.hex()} is not with this router")
        return each

    def _deliver(self, each: Underway, tokens: messages.Tokens) -> None:
        request_id, index = tokens.request_id, tokens.index
        logprobs = [inference.TokenLogprobs.FromString(packed) for packed in tokens.logprobs]
        more = logprobs, tokens.finish_reason, tokens.prompt_logprobs, tokens.pooled
        command = Deliver(request_id, index, tokens.token_ids, *more)
        if tokens.token_ids:
            each.token_ids[index] += tokens.token_ids
        if each.first_token_s is None and (tokens.token_ids or tokens.pooled):
            each.first_token_s = self.clock.now_s()
        if tokens.finish_reason:
            each.ended.add(index)
        if tokens.prompt_logprobs is not None:
            each.num_scored += len(tokens.prompt_logprobs)
        match each.answer.deliver(command):
            case StopStringFound():
                each.ended.add(index)
                self._tell(each, messages.Stopped(request_id, index))
            case ClientTooSlow(_, limit_bytes):
                each.is_over = reads_too_slowly(limit_bytes)
                self._tell(each, messages.TooSlow(request_id, limit_bytes))
            case _:
                pass

    def _tell(self, each: Underway, message: messages.Message) -> None:
        if each.link is not None:
            each.link.channel.post(message)

    def _end(self, each: Underway, outcome: Finished | Refused) -> None:
        each.answer.end(outcome)
        del self._underway[each.event.request_id]
        if not self._underway:
            self._idle.set()
