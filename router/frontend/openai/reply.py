"""Writes the answers of one HTTP request: as server-sent events, or as one response when they are complete.

The task that serves a request sleeps until the stream has ended: `Answer.write` writes the chunks. Invariant: the
status is sent with the first token, so that a request which ends earlier gets an HTTP error, unless the client asked
for the headers at once or nothing was written for KEEP_ALIVE_S. And at most one write of each answer waits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Refused, RefusedError
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.intake import Intake, Preparing
from pdserve.router.frontend.openai.connection import Connection, header_lines
from pdserve.router.frontend.openai.dialect import KEEP_ALIVE, Choice, Json, Shown, ledger_of
from pdserve.router.frontend.openai.errors import JSON, Header
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.timeline import Usage

KEEP_ALIVE_S = 15.0  # of silence, after which a comment is written
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
ROUTERS_ID = b"x-pdserve-request-id"  # one for each request of a call: the id in ledgers, logs and the live page


Settle = Callable[[Sequence[Usage], Json | list[Json]], Awaitable[None]]


class AnyResponse(Protocol):
    """How one response is written, in the JSON of the API that was called."""

    num_prompt_tokens: int  # of the requests that have begun

    @property
    def shown(self) -> Shown: ...

    @property
    def settle(self) -> Settle | None:
        """What is done once the answer is complete, before the client has its end; may raise RefusedError."""

    def chunks(self, choice: Choice, gain: Gain) -> bytes:
        """Return the events for what a choice gained, without its end."""
        ...

    def last_chunk(self, choice: Choice, ledger: Json | None) -> bytes:
        """Return the events that end a choice, with `ledger` if there is one."""
        ...

    def end(self, usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        """Return the events that end a stream."""
        ...

    def refused(self, refused: Refused) -> bytes:
        """Return the events that end a stream whose answer has ended without being complete."""
        ...

    def body(self, choices: Sequence[tuple[Choice, Gain]], usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        """Return a whole response. Each choice comes with everything it gained."""
        ...


@dataclass(slots=True, eq=False)
class Part:
    """One request of a call: the `Sink` of its answer."""

    reply: "Reply"
    choices: list[Choice]
    gains: list[Gain] = field(default_factory=list)  # everything that each choice gained, unless it is streamed
    answer: Answer | None = None
    outcome: Outcome | None = None

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        self.outcome = outcome
        return self.reply.take(self, gains)

    def cut_off(self, outcome: Refused) -> None:
        self.reply.connection.transport.abort()

    def ledger(self) -> Json:
        assert self.answer is not None
        assert isinstance(self.outcome, Finished)
        return ledger_of(self.answer.hex_id, self.outcome.ledger)


class Reply:
    """The response to a call. Its two kinds differ in what `take` does with gains."""

    def __init__(
        self, connection: Connection, response: AnyResponse, headers: Sequence[Header], choices: Sequence[list[Choice]]
    ) -> None:
        """`choices`: for each request of the call, its choices."""
        self.connection = connection
        self.response = response
        self.headers = list(headers)
        self.parts = [Part(self, each) for each in choices]  # made at once: the first may end before the last is opened
        self._is_lost = connection.transport.is_closing()
        self._news = asyncio.Event()
        connection.reply = self

    async def begin_part(
        self,
        part: Part,
        intake: Intake,
        request: inference.GenerateRequest,
        key: bytes | None,
        received_s: float,
        preparing: Preparing,
    ) -> None:
        """Open one request of the call. Raises what Intake.accept raises."""
        part.answer = await intake.accept(request, part, key, received_s=received_s, preparing=preparing)
        self.headers.append((ROUTERS_ID, part.answer.hex_id.encode()))
        part.choices[0].prompt.token_ids = part.answer.event.token_ids
        self.response.num_prompt_tokens += len(part.answer.event.token_ids)

    def close(self, intake: Intake) -> None:
        """Leave all answers; requests that have not ended are cancelled."""
        if self.connection.reply is self:  # else the next request on the connection has begun
            self.connection.reply = None
        for part in self.parts:
            if part.answer is not None:
                intake.leave(part.answer)
        self.parts = []  # they refer to this reply: leave no cycle to the garbage collector

    def take(self, part: Part, gains: Sequence[Gain]) -> bool:
        """Take what a part gained, and its end; return whether the part may write more at once."""
        raise NotImplementedError

    def lost(self) -> None:
        """Note that the connection is gone."""
        self._is_lost = True
        self._news.set()

    def resume(self) -> None:
        """Let the answers continue: the connection takes bytes again."""
        for part in self.parts:
            if part.answer is not None and part.outcome is None:
                part.answer.resume()

    @property
    def refusal(self) -> Refused | None:
        """Why the first part that was refused ended so; None if no part was."""
        return next((part.outcome for part in self.parts if isinstance(part.outcome, Refused)), None)

    @property
    def has_ended(self) -> bool:
        return all(part.outcome is not None for part in self.parts)

    def _usages(self) -> list[Usage]:
        return [part.outcome.usage for part in self.parts if isinstance(part.outcome, Finished)]

    def _ledger(self) -> Json | list[Json]:
        ledgers = [part.ledger() for part in self.parts]
        return ledgers[0] if len(ledgers) == 1 else ledgers


class Whole(Reply):
    """A response in one piece: keeps the answers until they are complete."""

    async def run(self, send: Send) -> None:
        """Write the response; RefusedError where a part ended without its answer."""
        while not (self._is_lost or self.has_ended or self.refusal):
            await self._news.wait()
            self._news.clear()
        if self._is_lost:
            return
        if self.refusal is not None:
            raise RefusedError(self.refusal)
        kept = [each for part in self.parts for each in zip(part.choices, part.gains, strict=True)]
        usages, ledger = self._usages(), self._ledger()
        body = self.response.body(kept, usages, ledger)
        if self.response.settle is not None:
            await self.response.settle(usages, ledger)
        await respond(send, 200, body, [*JSON, *self.headers])

    def take(self, part: Part, gains: Sequence[Gain]) -> bool:
        if not part.gains:
            part.gains = [Gain(place) for place in range(len(part.choices))]
        for gain in gains:
            part.gains[gain.index].add(gain)
        if part.outcome is not None:
            self._news.set()
        return True


class Stream(Reply):
    """A response in server-sent events: writes them as the answers come."""

    def __init__(
        self,
        connection: Connection,
        cycle: RequestResponseCycle,
        response: AnyResponse,
        headers: Sequence[Header],
        choices: Sequence[list[Choice]],
        *,
        begins_at_once: bool,
    ) -> None:
        """`cycle`: uvicorn's object for this request. `begins_at_once`: send the headers before the first token."""
        super().__init__(connection, response, headers, choices)
        self._cycle = cycle
        self._begins_at_once = begins_at_once
        self._is_opened = False  # all parts: none can be refused as invalid any more
        self._unsent = b""  # what was gained before that
        self._is_begun = False  # something was written, or is in `_unsent`
        self._is_over = False  # the same holds for the last event
        self._is_complete = False  # all parts are, and the last event waits for `settle`
        self._is_silent = True  # nothing was written since the timer was set
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._break_silence)

    def close(self, intake: Intake) -> None:
        super().close(intake)
        self._timer.cancel()

    async def run(self, send: Send) -> None:
        """Let the response be written; RefusedError where a part ended without its answer before that began."""
        if self._is_lost:
            return
        self._is_opened = True
        if self._unsent:
            data, self._unsent = self._unsent, b""
            if self._write(data):
                self.resume()
        elif self._begins_at_once and self.refusal is None:
            self._put(KEEP_ALIVE)
        await self._news.wait()
        if self.refusal is not None and not self._is_begun:
            raise RefusedError(self.refusal)
        if self._is_complete and self.response.settle is not None:
            await self._settle(self.response.settle)

    async def _settle(self, settle: Settle) -> None:
        """Do what comes before the last event, and write that."""
        usages, ledger = self._usages(), self._ledger()
        try:
            await settle(usages, ledger)
            ending = self.response.end(usages, ledger)
        except RefusedError as error:
            ending = self.response.refused(error.refused)
        self._is_over = True
        if not self._is_lost:
            self._put(ending)

    def take(self, part: Part, gains: Sequence[Gain]) -> bool:
        if self._is_over or self._is_lost:
            return False
        events = [each for gain in gains for each in self._events(part, gain)]
        if isinstance(part.outcome, Finished):
            events += self._endings(part)
            self._is_complete = self.has_ended and self.response.settle is not None
            if self._is_complete:
                self._news.set()
            elif self.has_ended:
                events.append(self.response.end(self._usages(), self._ledger()))
                self._is_over = True
        elif part.outcome is not None:
            if not (self._is_begun or any(events)):
                self._is_over = True  # the response must not begin with what other parts gain in the same turn
                self._news.set()
                return False
            events.append(self.response.refused(part.outcome))
            self._is_over = True
        return self._put(b"".join(events))

    def _events(self, part: Part, gain: Gain) -> list[bytes]:
        choice = part.choices[gain.index]
        events = [self.response.chunks(choice, gain)]
        if choice.finish_reason and any(each.finish_reason is None for each in part.choices):
            events.append(self.response.last_chunk(choice, None))
            choice.end_is_shown = True
        return events

    def _endings(self, part: Part) -> list[bytes]:
        """Return the last chunks of choices. The very last has the ledger, unless a chunk with the usage follows."""
        ending = [choice for choice in part.choices if not choice.end_is_shown]
        ledger = None if self.response.shown.usage else part.ledger()
        return [self.response.last_chunk(each, ledger if each is ending[-1] else None) for each in ending]

    def _put(self, data: bytes) -> bool:
        if not data:
            return True
        self._is_silent, self._is_begun = False, True
        if self._is_opened:
            return self._write(data)
        self._unsent += data
        return False

    def _write(self, data: bytes) -> bool:
        head = b"" if self._cycle.response_started else EVENT_STREAM + header_lines(self.headers)
        takes_more = self.connection.write_part(self._cycle, head, data, is_last=self._is_over)
        if self._is_over:
            self._news.set()
        return takes_more

    def _break_silence(self) -> None:
        if self._is_lost:
            return
        if self._is_silent and not self._is_over:
            self._put(KEEP_ALIVE)
        self._is_silent = True
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._break_silence)


async def respond_in_parts(send: Send, status: int, parts: Iterable[bytes], headers: Sequence[Header]) -> None:
    """Write a response whose parts are made as the client reads; others run between two."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def respond(send: Send, status: int, body: bytes, headers: Sequence[Header]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
