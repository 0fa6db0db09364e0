"""Calls whose answers are vectors of prompts. Each prompt of a call is a request of its own.

Invariant: at most MAX_UNDER_WAY prompts of a call are under way, however many it has, so that no call fills a queue;
and once a call cannot be answered, none of its prompts goes on.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import pooling_to_proto
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.refusal import Refused, RefusedError
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.clients import Visit
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai.connection import Connection
from pdserve.router.frontend.openai.fields import Served
from pdserve.router.frontend.openai.translate import PRIORITY, Headers, served_request
from pdserve.router.requests.commands import Finished

MAX_UNDER_WAY = 64
BEHIND = -1  # priority of prompts that ask for none: whoever waits for a chat is served first
_OURS = ("text: ", "token_ids: ", "prompt: ")  # names of a prompt in errors of the intake


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
    connection: Connection
    name_of: Callable[[int], str]  # of a prompt's field
    vectors: list[bytes] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    first_id: str = ""
    _under_way: set[_Part] = field(default_factory=set)
    _refused: Refused | None = None
    _is_lost: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, requests: Iterable[inference.GenerateRequest], visit: Visit, received_s: float) -> bool:
        """Serve the requests; False if the client is lost. RefusedError where one has ended without its vector."""
        self._is_lost = self.connection.transport.is_closing()
        self.connection.reply = self
        try:
            for place, request in enumerate(requests):
                await self._until_fewer_than(MAX_UNDER_WAY)
                if self._is_over:
                    break
                await self._begin(place, request, visit, received_s)
            await self._until_fewer_than(1)
        finally:
            if self.connection.reply is self:
                self.connection.reply = None
            for part in self._under_way:
                if part.answer is not None:
                    self.intake.leave(part.answer)
        if self._refused is not None and not self._is_lost:
            raise RefusedError(self._refused)
        return not self._is_lost

    async def _begin(self, place: int, request: inference.GenerateRequest, visit: Visit, received_s: float) -> None:
        part = _Part(self, place)
        self.vectors.append(b"")
        try:
            part.answer = await self.intake.accept(request, part, visit, received_s=received_s)
        except RefusedError as error:
            raise RefusedError(self._named(error.refused, place)) from None
        self.first_id = self.first_id or part.answer.hex_id
        self._under_way.add(part)

    async def _until_fewer_than(self, count: int) -> None:
        while len(self._under_way) >= count and not self._is_over:
            await self._news.wait()
            self._news.clear()

    @property
    def _is_over(self) -> bool:
        return self._is_lost or self._refused is not None

    def take_end(self, part: _Part, outcome: Outcome) -> None:
        self._under_way.discard(part)
        if isinstance(outcome, Finished):
            self.finished.append(outcome)
        elif self._refused is None:
            self._refused = self._named(outcome, part.place)
        self._news.set()

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
