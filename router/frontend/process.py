"""A frontend in a process of its own. The router's core is at the other end of a channel.

Arguments: the descriptor of the channel, the frontend's number, the router's process id, and the router's
configuration as JSON. The router decides when a frontend ends. If the router's process ends, the frontend ends at once.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import uvloop

from pdserve.clock import MonotonicClock
from pdserve.credentials import Connections
from pdserve.errors import ProtocolError, Status
from pdserve.garbage import collect_rarely, freeze_objects
from pdserve.ids import RequestId
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.commands import Deliver, Finished, Refused
from pdserve.router.config import RouterConfig
from pdserve.router.desk import Answer
from pdserve.router.events import ClientTooSlow, RequestArrived, StopStringFound
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.backend import Abort, EngineState, Readiness, State
from pdserve.router.frontend.channel import Channel
from pdserve.router.frontend.clients import Clients, TenantLimits
from pdserve.router.frontend.endpoints import open_endpoints
from pdserve.router.frontend.served import ServedModel, load_model
from pdserve.signals import STOP_SIGNALS, die_with_parent, end_served
from pdserve.telemetry import configure_logging
from pdserve.token_ids import pack

ABANDONED_STATUS = 1
_LIMITS = set(TenantLimits.model_fields)


class Remote:
    """The `Backend` in a frontend's process: sends what endpoints ask of the core, and delivers the core's messages."""

    def __init__(self) -> None:
        self.clock = MonotonicClock()  # the core's, too: a machine has one
        self.channel = Channel(messages.core_decoder, self.take, self._end)
        self.tenants = _Tenants(self)
        self.outcomes = _Outcomes(self.channel)
        self.connections = Connections()
        self.aborts: list[Abort] = []
        self.span_counts: Callable[[], Mapping[str, int]] = dict
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why; empty: by the router
        self.changed: Callable[[], None] = lambda: None  # called when `readiness` has changed
        self._readiness = Readiness(is_live=True, is_ready=False, can_serve=False, max_model_len=None)
        self._answers: dict[RequestId, Answer] = {}
        self._num_asked = 0
        self._replies: dict[int, asyncio.Future[bytes]] = {}  # replies that are still to come, by number

    def readiness(self) -> Readiness:
        return self._readiness

    def admit(self, event: RequestArrived, answer: Answer) -> None:
        self._answers[event.request_id] = answer
        self.channel.post(messages.Arrive(replace(event, token_ids=()), pack(event.token_ids).tobytes()))

    def leave(self, request_id: RequestId) -> None:
        if request_id in self._answers:
            self.channel.post(messages.Leave(request_id))

    def fail(self, error: Exception) -> None:
        if not self.stopped.done():
            self.stopped.set_exception(error)

    async def connect(self, ours: socket.socket) -> None:
        """Begin to use the channel."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=ours)

    async def live(self) -> State:
        return msgspec.msgpack.decode(await self._ask("live"), type=State)

    async def live_request(self, name: str) -> dict[str, Any] | None:
        return msgspec.msgpack.decode(await self._ask("request", name.encode()), type=dict[str, Any] | None)

    async def metrics(self) -> bytes:
        return await self._ask("metrics")

    async def engine(self) -> EngineState:
        return msgspec.msgpack.decode(await self._ask("engine"), type=EngineState)

    def abort(self, tenant: str, names: Sequence[str]) -> None:
        self.channel.post(messages.Abort(tenant, names))

    def _ask(self, what: messages.What, data: bytes = b"") -> asyncio.Future[bytes]:
        number, reply = self.new_reply()
        self.channel.post(messages.Ask(number, what, data))
        return reply

    def new_reply(self) -> tuple[int, asyncio.Future[bytes]]:
        """Return a number for a message that the core will reply to, and its future reply."""
        self._num_asked += 1
        reply = self._replies[self._num_asked] = asyncio.get_running_loop().create_future()
        return self._num_asked, reply

    def take(self, message: messages.FromCore) -> None:
        """Carry out a message of the core's."""
        match message:
            case messages.Tokens():
                self._deliver(message)
            case messages.Ended(request_id, finished, refused):
                outcome = finished or refused
                if outcome is None:
                    raise ProtocolError("an end of a request says neither finished nor refused")
                self._answers.pop(request_id).end(outcome)
            case messages.Reply(number, data):
                self._take_reply(number, data)
            case messages.ReadinessChanged(readiness):
                self._readiness = readiness
                self.changed()
            case messages.Abort(tenant, names):
                for abort in self.aborts:
                    abort(tenant, names)
            case messages.Ping():
                counted = self.connections
                self.channel.post(messages.Pong(dict(self.span_counts()), counted.num_opened, counted.num_called))
            case messages.Stop():
                self._end("")

    def _take_reply(self, number: int, data: bytes) -> None:
        reply = self._replies.pop(number)
        if not reply.done():
            reply.set_result(data)

    def _deliver(self, tokens: messages.Tokens) -> None:
        request_id, index = tokens.request_id, tokens.index
        logprobs = [inference.TokenLogprobs.FromString(packed) for packed in tokens.logprobs]
        command = Deliver(request_id, index, tokens.token_ids, logprobs, tokens.finish_reason, tokens.prompt_logprobs)
        match self._answers[request_id].deliver(command):
            case StopStringFound():
                self.channel.post(messages.Stopped(request_id, index))
            case ClientTooSlow(_, limit_bytes):
                self.channel.post(messages.TooSlow(request_id, limit_bytes))
            case _:
                pass

    def _end(self, why: str) -> None:
        if not self.stopped.done():
            self.stopped.set_result(why)


class _Tenants:
    """The `Tenants` in a frontend's process: the core counts."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._channel = remote.channel

    async def begin(self, tenant: str, limits: TenantLimits) -> Refused | None:
        number, reply = self._remote.new_reply()
        own = limits.model_dump_json(include=_LIMITS)  # without the keys, which a tenant's entry in the file has
        self._channel.post(messages.Begin(number, tenant, own.encode()))
        try:
            return _refused(await asyncio.shield(reply))
        except asyncio.CancelledError:
            reply.add_done_callback(lambda reply: None if _refused(reply.result()) else self.end(tenant))
            raise

    def spend(self, tenant: str, num_tokens: int) -> None:
        self._channel.post(messages.Spend(tenant, num_tokens))

    def end(self, tenant: str) -> None:
        self._channel.post(messages.Done(tenant))

    def deny(self, reason: str) -> None:
        self._channel.post(messages.Deny(reason))


def _refused(reply: bytes) -> Refused | None:
    return msgspec.msgpack.decode(reply, type=Refused | None)


class _Outcomes:
    """The `Outcomes` in a frontend's process: the core counts."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def reject(self, status: Status) -> None:
        self._channel.post(messages.Rejected(status))

    def end(self, event: RequestArrived, outcome: Finished | Refused, finish_reasons: Sequence[int]) -> None:
        refused = outcome if isinstance(outcome, Refused) else None
        num_tokens = outcome.usage.completion_tokens if isinstance(outcome, Finished) else 0
        self._channel.post(messages.Counted(event.request_id, list(finish_reasons), num_tokens, refused))


def main() -> None:
    descriptor, number, router = map(int, sys.argv[1:4])
    os.set_inheritable(descriptor, False)  # a child with it would keep the channel open after this process
    for stop in STOP_SIGNALS:  # a terminal and systemd send them to all processes of a router
        signal.signal(stop, signal.SIG_IGN)
    die_with_parent(router)
    config = RouterConfig.model_validate_json(sys.argv[4])
    collect_rarely()
    configure_logging(f"frontend-{number}", config.log_level, config.log_format)
    model = load_model(config)
    freeze_objects()
    with socket.socket(fileno=descriptor) as ours:
        uvloop.run(serve(config, model, ours))
    end_served(0)


async def serve(config: RouterConfig, model: ServedModel, ours: socket.socket) -> None:
    """Serve a model's clients until the router asks for the end."""
    remote = Remote()
    await remote.connect(ours)
    async with open_endpoints(config, model, remote, Clients(config.api_keys_file, remote.tenants)) as endpoints:
        remote.changed = endpoints.changed
        remote.channel.post(messages.Ready())
        why = await remote.stopped
        if why:
            os._exit(ABANDONED_STATUS)  # the core is gone


if __name__ == "__main__":
    main()
