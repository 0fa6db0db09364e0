"""One request's answer on its way from the core to an endpoint: tokens become text, and what waits is joined.

Invariant: the endpoint's sink gets each gain once and in order, and nothing after the end. The sink is called again
only after it has taken what it was given. What waits meanwhile is bounded: a sink that lets more wait gets nothing
further, and the answer is cut off at the request's end.

An answer is written at the end of a turn of the event loop in which it gained something. Where steps are short, workers
report several steps together (`worker/reporting.py`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdserve.base.errors import InvariantError
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Refused, reads_too_slowly
from pdserve.protocol.sampling import PromptLogprobs
from pdserve.router.requests.commands import Deliver, Finished
from pdserve.router.requests.events import ClientTooSlow, RequestArrived, StopStringFound
from pdserve.text.stop import OutputText

GAIN_BYTES = 16  # of a gain's frame and small fields, roughly
TOKEN_BYTES = 4

Outcome = Finished | Refused


@dataclass(slots=True)
class Gain:
    """What one continuation gained since its sink was last called."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # may lag behind token_ids, where a character or a stop string may still be unfinished
    logprobs: list[inference.TokenLogprobs] = field(default_factory=list)  # parallel to token_ids, if asked for
    finish_reason: int = 0  # FinishReason; 0: it goes on
    stop_match: str | int | None = None  # what ended it: a stop string, or one of stop_token_ids
    prompt_logprobs: list[PromptLogprobs] = field(
        default_factory=list
    )  # of the prompt's next tokens; before any tokens
    pooled: bytes = b""  # the vector that was asked for in place of tokens

    def add(self, later: "Gain") -> None:
        """Add what the same continuation gained next."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason, self.stop_match = later.finish_reason, later.stop_match
        self.pooled = later.pooled


class Sink(Protocol):
    """Where an answer goes: an endpoint's object that writes it in the endpoint's protocol.

    The event loop calls it; it must neither wait nor raise.
    """

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        """Write what the answer gained, and the answer's end unless `outcome` is None. The sink may keep the gains.

        Returns whether the sink takes more at once. If not, the answer collects until the sink calls `answer.resume()`.
        """

    def cut_off(self, outcome: Refused) -> None:
        """End the answer at once, in the middle of a write if need be: its reader is too slow."""


class Answer:
    """Takes a request's tokens and end from the core, without waiting, and gives them to the request's sink."""

    def __init__(
        self,
        event: RequestArrived,
        sink: Sink,
        *,
        outputs: Sequence[OutputText],
        max_unsent_bytes: int,
        pace: "Pace",
        on_end: Callable[["Answer", Outcome], None],
    ) -> None:
        """`on_end` is called when the core has ended the request, before the sink is called with the end."""
        self.event = event
        self.hex_id = event.request_id.hex()
        self.ignored: tuple[str, ...] = ()  # of the request's schemas
        self.keeps = False  # whether what was gained is kept
        self.kept_ids: list[int] = []
        self.kept_text: list[str] = []
        self.num_tokens = 0  # of all continuations
        self.num_written = self.num_unsent = 0  # tokens
        self.outcome: Outcome | None = None  # how the request ended
        self.finish_reasons: list[int] = []  # of the continuations that have ended
        self._sink: Sink | None = sink  # None: it has the end, or its client has left
        self._outputs: list[OutputText | None] = list(outputs)  # None: the continuation has ended
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: dict[int, Gain] = {}  # by continuation
        self._unsent_bytes = 0
        self._takes_more = True  # the sink does
        self._was_cut_off = False
        self._has_stopped = False  # a continuation, at a stop string
        self._pace = pace
        self._on_end = on_end

    def deliver(self, command: Deliver) -> StopStringFound | ClientTooSlow | None:
        """Add tokens; return what the core has to know about it."""
        index = command.index
        output = self._outputs[index]
        if output is None or self._was_cut_off:
            return None  # workers decoded these tokens before they heard of the stop string or the slow reader
        if self._unsent_bytes > self._max_unsent_bytes and not self._takes_more:
            self._was_cut_off = True
            return ClientTooSlow(self.event.request_id, self._max_unsent_bytes)
        gain = self._unsent.get(index)
        if gain is None:
            gain = self._unsent[index] = Gain(index)
            self._unsent_bytes += GAIN_BYTES
        if command.prompt_logprobs is not None:
            gain.prompt_logprobs.append(command.prompt_logprobs)
            self._unsent_bytes += command.prompt_logprobs.num_bytes
            self._note_news(is_urgent=False)
            return None
        ends_in_stop_token = command.finish_reason == inference.FINISH_REASON_STOP
        gained = output.push(command.token_ids, ends_in_stop_token=ends_in_stop_token)
        text, stop, finish_reason = gained.text, gained.stop, command.finish_reason
        if finish_reason and stop is None:
            last = output.finish()
            text, stop = text + last.text, last.stop
        self._add(gain, command, gained.num_tokens, text)
        if stop is not None:
            finish_reason = inference.FINISH_REASON_STOP
            gain.stop_match = stop
            self._has_stopped = True
        elif ends_in_stop_token and gain.token_ids and gain.token_ids[-1] in self.event.params.stop_token_ids:
            gain.stop_match = gain.token_ids[-1]
        if finish_reason:
            gain.finish_reason, gain.pooled = finish_reason, command.pooled
            self._unsent_bytes += len(command.pooled)
            self._outputs[index] = None
            self.finish_reasons.append(finish_reason)
        self._note_news(is_urgent=bool(finish_reason))
        return StopStringFound(self.event.request_id, index) if stop is not None else None

    def _add(self, gain: Gain, command: Deliver, num_tokens: int, text: str) -> None:
        token_ids, logprobs = command.token_ids, command.logprobs
        if num_tokens < len(token_ids):
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        gain.token_ids += token_ids
        gain.text += text
        if self.keeps:
            self.kept_ids += token_ids
            self.kept_text.append(text)
        self.num_tokens += len(token_ids)
        self.num_unsent += len(token_ids)
        self._unsent_bytes += TOKEN_BYTES * len(token_ids) + len(text)
        for logprob in logprobs:
            if not isinstance(logprob, inference.TokenLogprobs):
                raise InvariantError(f"logprobs of a delta are {type(logprob).__name__}")
            gain.logprobs.append(logprob)
            self._unsent_bytes += logprob.ByteSize()

    def end(self, outcome: Outcome) -> None:
        """Note the request's end. A client that reads too slowly does not get to read what waits."""
        if isinstance(outcome, Finished):
            if self._was_cut_off:  # its last tokens were dropped
                outcome = reads_too_slowly(self._max_unsent_bytes)
            elif self._has_stopped:  # the core may have taken tokens that came after
                outcome = replace(outcome, usage=replace(outcome.usage, completion_tokens=self.num_tokens))
        self.outcome = outcome
        self._on_end(self, outcome)
        if self._was_cut_off and isinstance(outcome, Refused):
            self._unsent.clear()
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.cut_off(outcome)
        self._note_news(is_urgent=True)

    def leave(self) -> None:
        """Give the sink nothing more."""
        self._sink = None
        self._unsent.clear()

    def resume(self) -> None:
        """Note that the sink has taken what it was given."""
        self._takes_more = True
        if self._unsent or self.outcome is not None:
            self._note_news(is_urgent=self.outcome is not None)

    def _note_news(self, *, is_urgent: bool) -> None:
        if self._takes_more and not self._was_cut_off and self._sink is not None:
            self._pace.add(self, is_urgent=is_urgent or self._unsent_bytes > self._max_unsent_bytes)

    def write(self) -> None:
        """Give the sink everything that waits. Called by Pace."""
        sink, outcome = self._sink, self.outcome
        if sink is None or self._was_cut_off or not self._takes_more:
            return
        gains = list(self._unsent.values())
        self._unsent.clear()
        self.num_written += self.num_unsent
        self.num_unsent = self._unsent_bytes = 0
        if outcome is not None:
            self._sink = None
        self._takes_more = sink.write(gains, outcome)


class Pace:
    """Decides when answers are written: several gains of one turn of the event loop in one write."""

    def __init__(
        self, interval: int | None, loop: asyncio.AbstractEventLoop, fail: Callable[[Exception], None]
    ) -> None:
        """`interval`: how many tokens of an answer are written together, except its first and last; None: 1.

        `fail` gets what a write raises. Sinks do not raise, so an exception is a bug and stops the process.
        """
        self._interval = interval or 1
        self._fail = fail
        self._loop = loop
        self._due: dict[Answer, None] = {}  # to be written in this turn

    def add(self, answer: Answer, *, is_urgent: bool) -> None:
        """Write an answer that has gained something at the end of this turn, or wait until it has gained more."""
        if answer in self._due:
            return
        if is_urgent or not answer.num_written or answer.num_unsent >= self._interval:
            if not self._due:
                self._loop.call_soon(self._write)
            self._due[answer] = None

    def _write(self) -> None:
        due, self._due = self._due, {}
        try:
            for answer in due:
                answer.write()
        except Exception as error:
            self._fail(error)
            raise
