"""The router's end of the channel to a frontend."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec

from pdserve.base.errors import InvariantError, ProtocolError
from pdserve.base.ids import RequestId
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Refused
from pdserve.protocol.sampling import SamplingParams
from pdserve.protocol.token_ids import ALL_IDS, from_wire, pack
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.backend import Readiness
from pdserve.router.frontend.channel import Channel
from pdserve.router.frontend.clients import TenantLimits
from pdserve.router.local_backend import LocalBackend
from pdserve.router.requests.commands import Deliver, Finished
from pdserve.router.requests.events import ClientTooSlow, RequestArrived, Resumed, StopStringFound
from pdserve.router.requests.request import ATTEMPTS_OF_A_ROUTER

MAX_UNANSWERED = 10  # pings
MAX_OF_TENANT = 10**6  # requests under way, as `TenantLimits.max_concurrent` may allow
MAX_ROUTERS = 2**32 // ATTEMPTS_OF_A_ROUTER - 1  # that may have had a request: attempts are numbers of 32 bits


class FrontendLink:
    """Carries out what a frontend asks for. When the channel ends, so does everything that the frontend began."""

    def __init__(
        self, backend: LocalBackend, abort: Callable[[messages.Abort], None], greeted: Callable[[], None] = lambda: None
    ) -> None:
        """`abort` forwards a message to all frontends; `greeted` is called once the frontend has a name."""
        self.attached: messages.Attached | None = None  # its first message
        self.channel = Channel(messages.frontend_decoder, self._take)
        self._backend = backend
        self._abort = abort
        self._greeted = greeted
        self._answers: dict[RequestId, _Forwarding] = {}  # until the frontend has reported what it sent
        self._begun: Counter[str] = Counter()  # requests under way, by tenant
        self._replies: set[asyncio.Task[None]] = set()
        self._num_unanswered = 0  # pings in a row
        self._counted = messages.Pong({}, 0, 0)  # as last reported
        self._readiness: Readiness | None = None  # as the frontend knows it

    def show(self, readiness: Readiness) -> None:
        """Tell the frontend whether the router serves, if that has changed."""
        if readiness != self._readiness:
            self._readiness = readiness
            self.channel.post(messages.ReadinessChanged(readiness))

    def ping(self) -> None:
        """Send a ping; end the channel if the frontend has not answered the last MAX_UNANSWERED pings."""
        if self._num_unanswered == MAX_UNANSWERED:
            self.channel.close(f"it hangs: {MAX_UNANSWERED} pings wait for their answers")
        self._num_unanswered += 1
        self.channel.post(messages.Ping())

    def _take(self, message: messages.FromFrontend) -> None:
        if self.attached is None:
            self._greet(message)
        elif isinstance(message, messages.Goodbye):
            self.channel.close(messages.SAID_GOODBYE)
        elif isinstance(message, messages.Attached):
            raise ProtocolError("Attached comes first, and once")
        else:
            self._carry_out(message)

    def _carry_out(self, message: messages.OfFrontend) -> None:
        backend = self._backend
        match message:
            case messages.Arrive(event, token_ids):
                self._take_arrival(event, token_ids)
            case messages.Leave() | messages.TooSlow() | messages.Stopped() | messages.Counted():
                answer = self._answers.get(message.request_id)
                if answer is not None:  # else the request has ended already
                    self._take_news(answer, message)
            case messages.Rejected(status):
                backend.outcomes.reject(status)
            case messages.Ask():
                task = asyncio.create_task(self._reply(message), name="reply to a frontend")
                self._replies.add(task)
                task.add_done_callback(self._replies.discard)
            case messages.Abort():
                self._abort(message)
            case messages.Pong():
                self._num_unanswered = 0
                before, self._counted = self._counted, message
                backend.num_spans.update(Counter(message.num_spans) - Counter(before.num_spans))
                backend.connections.num_opened += message.num_opened - before.num_opened
                backend.connections.num_called += message.num_called - before.num_called
            case _:
                self._take_use(message)

    def _greet(self, message: messages.FromFrontend) -> None:
        if not isinstance(message, messages.Attached) or not message.frontend_id:
            raise ProtocolError(f"the first message is {type(message).__name__}, and not Attached with a name")
        if message.version != messages.PROTOCOL_VERSION:
            text = f"protocol version {message.version} of the frontend is not {messages.PROTOCOL_VERSION}"
            raise ProtocolError(f"{text}, which this router speaks")
        self.attached = message
        self._greeted()

    def _take_arrival(self, event: RequestArrived, token_ids: bytes) -> None:
        request_id = event.request_id
        if request_id in self._answers or self._backend.shell.core.find(request_id) is not None:
            raise ProtocolError(f"request {request_id.hex()} has come before")
        prompt = from_wire(token_ids, "token_ids")
        if not prompt:
            raise ProtocolError(f"request {request_id.hex()} has no tokens")
        event.params.validate(ALL_IDS)  # frontends know the model's vocabulary
        if event.resumed is not None:
            _check_resumed(event.resumed, event.params, len(prompt))
        if not self._backend.readiness().is_live:
            self.show(self._backend.readiness())  # first, so that it is not sent here again
            self.channel.post(messages.Returned(request_id))
            return
        event = at(event, self._backend.clock.now_s())
        answer = self._answers[request_id] = _Forwarding(event, self.channel)
        self._backend.submit(replace(event, token_ids=prompt), answer)

    def _take_news(
        self, answer: "_Forwarding", message: messages.Leave | messages.TooSlow | messages.Stopped | messages.Counted
    ) -> None:
        match message:
            case messages.Leave(request_id):
                self._backend.leave(request_id)
            case messages.TooSlow(request_id, limit_bytes):
                self._backend.shell.post(ClientTooSlow(request_id, limit_bytes))
            case messages.Stopped(request_id, index):
                if index not in range(answer.event.params.n):
                    raise ProtocolError(f"index: {index} of a request whose n is {answer.event.params.n}")
                self._backend.shell.post(StopStringFound(request_id, index))
            case messages.Counted(request_id, finish_reasons):
                outcome = answer.outcome
                if outcome is None:
                    raise ProtocolError(f"request {request_id.hex()} has not ended")
                if isinstance(outcome, Finished):
                    usage = replace(outcome.usage, completion_tokens=message.num_tokens)
                    outcome = message.refused or replace(outcome, usage=usage)
                del self._answers[request_id]
                self._backend.outcomes.end(answer.event, outcome, finish_reasons)

    def _take_use(
        self, message: messages.Begin | messages.Using | messages.Spend | messages.Done | messages.Deny
    ) -> None:
        tenants = self._backend.tenants
        match message:
            case messages.Begin(number, tenant, limits):
                refused = tenants.begin_now(tenant, TenantLimits.model_validate_json(limits))
                if refused is None:
                    self._begun[tenant] += 1
                self.channel.post(messages.Reply(number, msgspec.msgpack.encode(refused)))
            case messages.Using(tenant, num_requests):
                if not 0 < num_requests <= MAX_OF_TENANT:
                    raise ProtocolError(f"num_requests: {num_requests} is outside [1, {MAX_OF_TENANT}]")
                tenants.take_over(tenant, num_requests)
                self._begun[tenant] += num_requests
            case messages.Spend(tenant, num_tokens):
                self._check_begun(tenant)
                tenants.spend(tenant, num_tokens)
            case messages.Done(tenant):
                self._check_begun(tenant)
                self._begun[tenant] -= 1
                tenants.end(tenant)
            case messages.Deny(reason):
                tenants.deny(reason)

    def _check_begun(self, tenant: str) -> None:
        if not self._begun[tenant]:
            raise ProtocolError(f"tenant {tenant!r} has no request under way here")

    async def _reply(self, asked: messages.Ask) -> None:
        try:
            self.channel.post(messages.Reply(asked.number, await self._asked(asked)))
        except Exception as error:
            self.channel.close(f"{type(error).__name__}: {error}")
            raise

    async def _asked(self, asked: messages.Ask) -> bytes:
        backend = self._backend
        match asked.what:
            case "live":
                return await backend.packed_live()
            case "request":
                return msgspec.msgpack.encode(await backend.live_request(asked.data.decode()))
            case "metrics":
                return await backend.metrics()
            case "engine":
                return msgspec.msgpack.encode(await backend.engine())

    def end(self) -> None:
        """End what the frontend began, as if its clients had left: the channel has ended."""
        for task in self._replies:
            task.cancel()
        answers, self._answers = self._answers, {}
        for request_id, answer in answers.items():
            self._backend.leave(request_id)
            if self._begun[answer.event.tenant]:  # requests that came with a key
                self._backend.tenants.spend(answer.event.tenant, answer.num_tokens)
            if answer.outcome is not None:
                self._backend.outcomes.end(answer.event, answer.outcome, answer.finish_reasons)
        for tenant in self._begun.elements():
            self._backend.tenants.end(tenant)


def at(event: RequestArrived, now_s: float) -> RequestArrived:
    """Return a request whose times count from now as one whose times are on a clock that shows `now_s`."""
    resumed = event.resumed
    if resumed is not None and resumed.first_token_s is not None:
        resumed = replace(resumed, first_token_s=now_s + resumed.first_token_s)
    return replace(event, received_s=now_s + event.received_s, deadline_s=now_s + event.deadline_s, resumed=resumed)


def _check_resumed(resumed: Resumed, params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raise ProtocolError for what no client can have."""
    lengths = [len(ids) for ids in resumed.token_ids]
    if len(lengths) != params.n or any(length > params.max_tokens for length in lengths):
        raise ProtocolError(f"resumed: tokens {lengths} of {params.n} continuations of {params.max_tokens} each")
    if not set(resumed.ended) <= set(range(params.n)):
        raise ProtocolError(f"resumed: ended {resumed.ended} of {params.n} continuations")
    try:
        for ids in resumed.token_ids:
            pack(ids)
    except OverflowError as error:
        raise ProtocolError(f"resumed: {error}") from error
    if not 0 < resumed.num_routers <= MAX_ROUTERS or not 0 < resumed.num_scored <= num_prompt_tokens:
        raise ProtocolError(f"resumed: {resumed.num_routers} routers, {resumed.num_scored} tokens scored")
    if any(lengths) == (resumed.first_token_s is None):
        raise ProtocolError(f"resumed: tokens {lengths}, and the first one came at {resumed.first_token_s}")


class _Forwarding:
    """Sends a request's tokens and its end to its frontend. The dispatcher's `Answer`."""

    def __init__(self, event: RequestArrived, channel: Channel) -> None:
        self.event = event
        self.outcome: Finished | Refused | None = None
        self.num_tokens = 0  # sent to the frontend
        self.finish_reasons: list[int] = []  # of the continuations that have ended
        self._channel = channel

    def deliver(self, command: Deliver) -> None:
        self.num_tokens += len(command.token_ids)
        if command.finish_reason:
            self.finish_reasons.append(command.finish_reason)
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
                command.pooled,
            )
        )

    def end(self, outcome: Finished | Refused) -> None:
        self.outcome = outcome
        finished = outcome if isinstance(outcome, Finished) else None
        refused = outcome if isinstance(outcome, Refused) else None
        self._channel.post(messages.Ended(self.event.request_id, finished, refused))
