"""One request's answer on its way to the client: text made of tokens, coalesced while the client is slow.

What waits is bounded: an answer that holds more than its limit when more comes says so, and takes no more.
"""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq

from pdserve.errors import InvariantError
from pdserve.ids import RequestId
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router import wire
from pdserve.router.events import ClientTooSlow, Deliver, Finished, Refused, StopStringFound
from pdserve.text.output import OutputText

DELTA_BYTES = 16  # of a delta's frame and small fields, roughly
TOKEN_BYTES = 4


class Answer:
    """Tokens come in through `deliver`, replies go out through `replies`; the former never waits for the latter."""

    def __init__(self, request_id: RequestId, outputs: Seq[OutputText], max_unsent_bytes: int) -> None:
        self.request_id = request_id
        self._hex_id = request_id.hex()
        self._outputs: list[OutputText | None] = list(outputs)  # None: the continuation has ended
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: dict[int, inference.SequenceDelta] = {}  # by continuation
        self._unsent_bytes = 0
        self._news = asyncio.Event()
        self._outcome: Finished | Refused | None = None
        self.writer: asyncio.Task[object] | None = None  # interrupted where its client is too slow
        self.was_cut_off = False

    @property
    def refusal(self) -> Refused | None:
        """How the request ended, if without its answer."""
        return self._outcome if isinstance(self._outcome, Refused) else None

    def deliver(self, command: Deliver) -> StopStringFound | ClientTooSlow | None:
        """Add tokens; return what the core has to know about it."""
        index = command.index
        output = self._outputs[index]
        if output is None:
            return None  # decoded before the workers heard of the stop string
        if self._unsent_bytes > self._max_unsent_bytes:
            self.was_cut_off = True
            return ClientTooSlow(self.request_id, self._max_unsent_bytes)
        delta = self._unsent.get(index)
        if delta is None:
            delta = self._unsent[index] = inference.SequenceDelta(index=index)
            self._unsent_bytes += DELTA_BYTES
        gained = output.push(command.token_ids)
        text, stop, finish_reason = gained.text, gained.stop, command.finish_reason
        if finish_reason and stop is None:
            last = output.finish()
            text, stop = text + last.text, last.stop
        self._add(delta, command, gained.num_tokens, text)
        if stop is not None:
            finish_reason = inference.FINISH_REASON_STOP
            delta.stop_match = stop
        if finish_reason:
            delta.finish_reason = inference.FinishReason.ValueType(finish_reason)
            self._outputs[index] = None
        self._news.set()
        return StopStringFound(self.request_id, index) if stop is not None else None

    def _add(self, delta: inference.SequenceDelta, command: Deliver, num_tokens: int, text: str) -> None:
        token_ids, logprobs = command.token_ids, command.logprobs
        if num_tokens < len(token_ids):
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        delta.token_ids.extend(token_ids)
        if text:
            delta.text += text
        self._unsent_bytes += TOKEN_BYTES * len(token_ids) + len(text)
        for logprob in logprobs:
            if not isinstance(logprob, inference.TokenLogprobs):
                raise InvariantError(f"logprobs of a delta are {type(logprob).__name__}")
            delta.logprobs.append(logprob)
            self._unsent_bytes += logprob.ByteSize()

    def end(self, outcome: Finished | Refused) -> None:
        """Note the request's end. A client that reads too slowly does not get to read what waits."""
        self._outcome = outcome
        if self.was_cut_off:
            self._unsent.clear()
            if self.writer is not None:
                self.writer.cancel()
        self._news.set()

    async def replies(self) -> AsyncIterator[inference.GenerateResponse]:
        """Yield what the client has not seen, as much at once as there is, until the end."""
        while True:
            await self._news.wait()
            self._news.clear()
            outcome = self._outcome
            reply = inference.GenerateResponse(request_id=self._hex_id, deltas=self._unsent.values())
            self._unsent.clear()
            self._unsent_bytes = 0
            if isinstance(outcome, Finished):
                reply.usage.CopyFrom(wire.usage_message(outcome.usage))
                reply.ledger.CopyFrom(wire.ledger_message(outcome.ledger))
            if reply.deltas or reply.HasField("usage"):
                yield reply
            if outcome is not None:
                return
