"""The core's end of a frontend's channel."""

import asyncio
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from pdserve.errors import InvariantError, ProtocolError
from pdserve.ids import RequestId
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.commands import Deliver, Finished, Refused
from pdserve.router.events import ClientTooSlow, RequestArrived, StopStringFound
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.api_keys import TenantLimits
from pdserve.router.frontend.backend import Standing
from pdserve.router.frontend.channel import Channel
from pdserve.router.hub import Hub


class FrontendLink:
    """Carries out what a frontend asks for. With the channel everything ends that it began."""

    def __init__(self, hub: Hub, abort: Callable[[messages.Abort], None]) -> None:
        """`abort` has all frontends end requests of a tenant."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()  # its doors are open
        self.lost: asyncio.Future[str] = loop.create_future()  # why the channel has ended
        self.channel = Channel(messages.frontend_decoder, self._take, self._end)
        self._hub = hub
        self._abort = abort
        self._answers: dict[RequestId, _Forwarding] = {}  # until the frontend has counted their ends
        self._begun: Counter[str] = Counter()  # requests, by tenant
        self._replies: set[asyncio.Task[None]] = set()
        self._standing: Standing | None = None  # that the frontend knows

    def show(self, standing: Standing) -> None:
        """Let the frontend know how the router stands."""
        if standing != self._standing:
            self._standing = standing
            self.channel.post(messages.Stands(standing))

    def _take(self, message: messages.FromFrontend) -> None:  # noqa: C901 - one match
        hub = self._hub
        match message:
            case messages.Arrive(event, token_ids):
                answer = self._answers[event.request_id] = _Forwarding(event, self.channel)
                hub.admit(replace(event, token_ids=array("I", token_ids)), answer)
            case messages.Leave(request_id):
                hub.leave(request_id)
            case messages.TooSlow(request_id, limit_bytes):
                hub.post(ClientTooSlow(request_id, limit_bytes))
            case messages.Stopped(request_id, index):
                hub.post(StopStringFound(request_id, index))
            case messages.Counted(request_id, finish_reasons):
                self._count(self._answers.pop(request_id), finish_reasons)
            case messages.Rejected(status):
                hub.outcomes.reject(status)
            case messages.Ask(number, what, data):
                self._reply(number, self._asked(what, data))
            case messages.Abort():
                self._abort(message)
            case messages.Spans(counts):
                hub.num_spans.update(counts)
            case messages.Ready():
                self.ready.set_result(None)
            case _:
                self._take_use(message)

    def _take_use(
        self, message: messages.Begin | messages.Spend | messages.Done | messages.Keep | messages.Deny
    ) -> None:
        tenants = self._hub.tenants
        match message:
            case messages.Begin(number, tenant, limits):
                self._reply(number, self._begin(tenant, limits))
            case messages.Spend(tenant, num_tokens):
                tenants.spend(tenant, num_tokens)
            case messages.Done(tenant):
                self._begun[tenant] -= 1
                tenants.end(tenant)
            case messages.Keep(names):
                tenants.keep(names)
            case messages.Deny(reason):
                tenants.deny(reason)

    def _count(self, answer: "_Forwarding", finish_reasons: list[int]) -> None:
        event, outcome = answer.event, answer.outcome
        if outcome is None:
            raise ProtocolError(f"request {event.request_id.hex()} has not ended")
        slo_s = event.ttft_slo_s, event.tpot_slo_s
        self._hub.outcomes.end(event.request_id, event.priority, slo_s, outcome, finish_reasons)

    def _reply(self, number: int, reply: Awaitable[bytes]) -> None:
        async def run() -> None:
            try:
                self.channel.post(messages.Reply(number, await reply))
            except Exception as error:
                self.channel.close(f"{type(error).__name__}: {error}")
                raise

        task = asyncio.create_task(run(), name="reply to a frontend")
        self._replies.add(task)
        task.add_done_callback(self._replies.discard)

    async def _begin(self, tenant: str, limits: bytes) -> bytes:
        refused = await self._hub.tenants.begin(tenant, TenantLimits.model_validate_json(limits))
        if refused is None:
            self._begun[tenant] += 1
        return msgspec.msgpack.encode(refused)

    async def _asked(self, what: messages.What, data: bytes) -> bytes:
        hub = self._hub
        match what:
            case "live":
                return (await hub.live(admin.GetLiveRequest.FromString(data))).SerializeToString()
            case "metrics":
                return b"" if hub.metrics is None else await hub.metrics()
            case "engine":
                return msgspec.msgpack.encode(await hub.engine())

    def _end(self, why: str) -> None:
        for task in self._replies:
            task.cancel()
        for request_id in self._answers:
            self._hub.leave(request_id)
        for tenant, count in self._begun.items():
            for _ in range(count):
                self._hub.tenants.end(tenant)
        self.lost.set_result(why)


class _Forwarding:
    """Sends a request's tokens and its end to its frontend. An `Answer` of the desk."""

    def __init__(self, event: RequestArrived, channel: Channel) -> None:
        self.event = event
        self.outcome: Finished | Refused | None = None
        self._channel = channel

    def deliver(self, command: Deliver) -> None:
        logprobs: list[bytes] = []
        for logprob in command.logprobs:
            if not isinstance(logprob, inference.TokenLogprobs):
                raise InvariantError(f"logprobs of a delta are {type(logprob).__name__}")
            logprobs.append(logprob.SerializeToString())
        self._channel.post(
            messages.Tokens(
                command.request_id,
                command.index,
                list(command.token_ids),
                logprobs,
                command.finish_reason,
                command.prompt_logprobs,
            )
        )

    def end(self, outcome: Finished | Refused) -> None:
        self.outcome = outcome
        finished = outcome if isinstance(outcome, Finished) else None
        refused = outcome if isinstance(outcome, Refused) else None
        self._channel.post(messages.Ended(self.event.request_id, finished, refused))
