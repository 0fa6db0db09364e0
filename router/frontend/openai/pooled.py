"""Calls whose answers are vectors of prompts. Each prompt of a call is a request of its own.

Invariant: at most MAX_UNDER_WAY prompts of a call are under way, however many it has, so that no call fills a queue;
and once a call cannot be answered, none of its prompts goes on.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf

from starlette.types import Scope

from pdserve.base.ids import new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import pooling_to_proto
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.clients import Visit
from pdserve.router.frontend.intake import Intake, Preparing
from pdserve.router.frontend.openai.connection import Connection
from pdserve.router.frontend.openai.dialect import Json, ledger_of, summed
from pdserve.router.frontend.openai.errors import Header
from pdserve.router.frontend.openai.fields import Served
from pdserve.router.frontend.openai.generation import REQUEST_ID, headers_of, ignored_names, visiting
from pdserve.router.frontend.openai.reply import ROUTERS_ID
from pdserve.router.frontend.openai.translate import PRIORITY, Headers, label_of, served_request
from pdserve.router.requests.commands import Finished

MAX_UNDER_WAY = 64
BEHIND = -1  # priority of prompts that ask for none: whoever waits for a chat is served first
RETRY_S = 0.25  # after which a call goes on if there was no room for one of its prompts
_MOMENTARY = frozenset({Cause.SLOTS, Cause.TURN, Cause.PREPARING})
_OURS = ("text: ", "token_ids: ", "prompt: ", "chat: ")  # names of a prompt in errors of the intake


def pooled_template(asked: Served, headers: Headers, pooling: Pooling) -> inference.GenerateRequest:
    """Return the part that the requests of all prompts share; RefusedError(INVALID_ARGUMENT) names a wrong field."""
    template = served_request(asked, headers)
    template.sampling.pooling.CopyFrom(pooling_to_proto(pooling))
    if asked.priority is None and PRIORITY not in headers:
        template.priority = BEHIND
    return template


@dataclass(eq=False, slots=True)
class _Part:
    """One prompt of a call: the `Sink` of its answer."""

    call: "PooledCall"
    place: int
    received_s: float | None = None  # from when its objectives count; None until it first begins
    answer: Answer | None = None

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        for gain in gains:
            self.call.vectors[self.place] = gain.pooled or self.call.vectors[self.place]
        if outcome is not None:
            self.call.take_end(self, outcome)
        return True

    def cut_off(self, outcome: Refused) -> None:
        self.call.take_end(self, outcome)


@dataclass(eq=False)
class PooledCall:
    """A call while it is served: the connection tells it when the client is lost."""

    intake: Intake
    asked: Served
    scope: Scope
    name_of: Callable[[int], str]  # of a prompt's field
    request_of: Callable[[int], inference.GenerateRequest]
    preparing: Preparing = field(default_factory=Preparing)
    max_tokens: float = inf  # of all prompts together
    vectors: list[bytes] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    first_id: str = ""
    _label: str = field(default_factory=lambda: new_request_id().hex())
    _waiting: deque[_Part] = field(default_factory=deque)
    _num_tokens: Counter[int] = field(default_factory=Counter)  # by place
    _under_way: set[_Part] = field(default_factory=set)
    _begin_s: float = 0.0  # before, no prompt begins
    _deadline_s: float = inf  # of the call, known from its first prompt
    _refused: Refused | None = None
    _is_lost: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def headers(self) -> list[Header]:
        """The headers of the response, also of a refusal."""
        own: list[Header] = [(REQUEST_ID, self._label.encode()), *ignored_names(self.asked.ignored)]
        return [*own, (ROUTERS_ID, self.first_id.encode())] if self.first_id else own

    @asynccontextmanager
    async def served(self, count: int) -> AsyncIterator[bool]:
        """Serve so many requests, and count the call as under way until the response is written, too.

        Yields False if the client is lost. RefusedError where a request has ended without its vector.
        """
        self._label = label_of(self.asked, headers_of(self.scope)) or self._label
        self.scope["state"]["headers"] = self.headers
        async with visiting(self.intake, self.scope) as visit:
            yield await self._run(count, visit)

    def shown(self) -> Json:
        """Return what a response has besides its results: model and usage, and the ledger of a single request."""
        usage = summed([each.usage for each in self.finished])
        counts: Json = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        shown: Json = {"model": self.intake.model.name_for(self.asked.model), "usage": counts}
        if len(self.finished) == 1:
            shown["pdserve"] = ledger_of(self.first_id, self.finished[0].ledger)
        return shown

    async def _run(self, count: int, visit: Visit) -> bool:
        connection: Connection = self.scope["state"]["connection"]
        self._is_lost = connection.transport.is_closing()
        self.vectors, self._waiting = [b""] * count, deque(_Part(self, place) for place in range(count))
        connection.reply = self
        try:
            while not self._is_over and (self._waiting or self._under_way):
                pause_s = self._begin_s - self.intake.backend.clock.now_s()
                has_room = bool(self._waiting) and len(self._under_way) < MAX_UNDER_WAY
                if has_room and pause_s <= 0:
                    await self._begin(self._waiting.popleft(), visit)
                    await asyncio.sleep(0)  # short prompts are tokenized and placed without a pause: let others run
                else:
                    await self._hear(pause_s if has_room else None)
        finally:
            if connection.reply is self:
                connection.reply = None
            for part in self._under_way:
                if part.answer is not None:
                    self.intake.leave(part.answer)
        if self._refused is not None and not self._is_lost:
            raise RefusedError(self._refused)
        return not self._is_lost

    async def _begin(self, part: _Part, visit: Visit) -> None:
        """Hand a prompt to the core. Objectives count from now for one that had to wait for others of its call."""
        now_s = self.intake.backend.clock.now_s()
        if part.received_s is None:
            part.received_s = self.scope["state"]["received_s"] if part.place < MAX_UNDER_WAY else now_s
        left_s = self._deadline_s - part.received_s
        try:
            request = self.request_of(part.place)
            answer = await self.intake.accept(request, part, visit, left_s, part.received_s, self.preparing)
        except RefusedError as error:
            self._refuse(part, error.refused)
            return
        part.answer = answer
        self.first_id = self.first_id or answer.hex_id
        self._deadline_s = min(self._deadline_s, answer.event.deadline_s)
        self._under_way.add(part)
        self._num_tokens[part.place] = len(answer.event.token_ids)
        num_tokens = self._num_tokens.total()
        if num_tokens > self.max_tokens:
            text = f"the first {part.place + 1} prompts have {num_tokens} tokens, over the limit of {self.max_tokens}"
            self._refused = Refused(Cause.INVALID, f"{self.name_of(part.place)}: {text} for a call")

    async def _hear(self, seconds: float | None) -> None:
        """Wait until something is new, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    @property
    def _is_over(self) -> bool:
        return self._is_lost or self._refused is not None

    def take_end(self, part: _Part, outcome: Outcome) -> None:
        self._under_way.discard(part)
        if isinstance(outcome, Finished):
            self.finished.append(outcome)
        else:
            self._refuse(part, outcome)
        self._news.set()

    def _refuse(self, part: _Part, refused: Refused) -> None:
        """End the call; or try the prompt again where there may be room for it in a moment."""
        again_s = self.intake.backend.clock.now_s() + RETRY_S
        if refused.cause in _MOMENTARY and self.first_id and again_s < self._deadline_s:
            self._waiting.appendleft(part)
            self._begin_s = again_s
        elif self._refused is None:
            self._refused = self._named(refused, part.place)

    def _named(self, refused: Refused, place: int) -> Refused:
        """Return a refusal with the name that the call has for the prompt."""
        ours = next((name for name in _OURS if refused.message.startswith(name)), None)
        if ours is None:
            return refused
        return replace(refused, message=f"{self.name_of(place)}: {refused.message.removeprefix(ours)}")

    def lost(self) -> None:
        self._is_lost = True
        self._news.set()

    def resume(self) -> None:
        """Do nothing: nothing is written before the end."""
