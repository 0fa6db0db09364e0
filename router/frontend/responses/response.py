"""The JSON of an answer as the Responses API has it: an object, whole or in events, and errors."""

import secrets
import time
from collections.abc import Sequence

from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai import errors
from pdserve.router.frontend.openai.dialect import Choice, Shown, encode, event, summed
from pdserve.router.frontend.openai.logprobs import TokenNames, chat_logprobs
from pdserve.router.frontend.openai.reply import Settle
from pdserve.router.frontend.responses.events import Json, Output
from pdserve.router.frontend.responses.fields import ResponseRequest
from pdserve.router.frontend.responses.tools import namespaces_of
from pdserve.router.requests.timeline import Usage
from pdserve.text.reasoning import ReasoningTokens
from pdserve.text.tokenizer import Tokenizer

_FIELDS = {  # as chats have them
    ".function.parameters": ".parameters",
    ".function.name": ".name",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "chat: ": "input: ",
}
_DELTA = (  # an event of text, as `written` writes it
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":%d,'
    b'"item_id":"%b","output_index":%d,"content_index":0,"logprobs":[],"delta":%b}\n\n'
)
_SERVER_ERROR, _RATE_LIMIT = "server_error", "rate_limit_exceeded"


class ItemsResponse:
    """One response: its items, and the events that bring them."""

    def __init__(
        self,
        asked: ResponseRequest,
        model: str,
        tokenizer: Tokenizer,
        reasoning: ReasoningTokens[Json] | None,
        name: str = "",
    ) -> None:
        """`reasoning` counts the tokens of reasoning; None: the answer has none."""
        self.shown = Shown()
        self.num_prompt_tokens = 0
        self.id = name or new_response_id()
        self.settle: Settle | None = None
        self.told = {"id": self.id, **envelope(asked, model)}  # the response's members as they are now
        self.output = Output(namespaces_of(asked.tools))
        self._reasoning = reasoning
        self._names = TokenNames(tokenizer) if asked.shows_logprobs else None
        self._is_text_alone = reasoning is None and self._names is None
        self._finish_reason: str | None = None

    def chunks(self, choice: Choice, gain: Gain) -> bytes:
        if choice.filter is None and self._is_text_alone and gain.text and not gain.finish_reason:
            place = self.output.extend(gain.text)
            if place is not None:
                number, item, index = place
                return _DELTA % (number, item.encode(), index, encode(gain.text))
        return written(self.gained(choice, gain))

    def last_chunk(self, choice: Choice, ledger: Json | None) -> bytes:
        return written(self.closed(choice))

    def end(self, usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        self.finish(usages, ledger)
        return written([self.ended()])

    def refused(self, refused: Refused) -> bytes:
        return written(self.broken(refused))

    def body(self, choices: Sequence[tuple[Choice, Gain]], usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        ((choice, gain),) = choices
        self.gained(choice, gain)
        self.closed(choice)
        self.finish(usages, ledger)
        return encode(self.told)

    def queued(self) -> list[Json]:
        return self.output.queue(dict(self.told))

    def gained(self, choice: Choice, gain: Gain) -> list[Json]:
        """Return the events for what the answer gained; the first ones begin the response."""
        events: list[Json] = []
        if not self.output.is_begun:
            self.told["status"] = "in_progress"
            events = self.output.begin(dict(self.told))
        logprobs: list[Json] = []
        if self._names is not None and gain.logprobs:
            logprobs = chat_logprobs(self._names, gain.token_ids, gain.logprobs)["content"]
        if self._reasoning is not None:
            logprobs = self._reasoning.push(gain.token_ids, logprobs)
        for delta in choice.deltas(gain):
            events += self.output.add(delta, logprobs)
            logprobs = []
        return events + (self.output.add({}, logprobs) if logprobs else [])

    def closed(self, choice: Choice) -> list[Json]:
        self._finish_reason = choice.finish_reason
        empty = [] if self.output.items else self.output.add({"content": ""})
        return empty + self.output.close(is_cut=choice.finish_reason == "length")

    def ended(self) -> Json:
        return self.output.end(self.told["status"], self.told)

    def broken(self, refused: Refused) -> list[Json]:
        if not self.output.is_told:
            error = errors.error_of(named(refused))
            return [self.output.error(**{name: error[name] for name in ("code", "message", "param")})]
        events = self.output.close(is_cut=True)
        self.fail(refused)
        return [*events, self.output.end("failed", self.told)]

    def fail(self, refused: Refused) -> None:
        """Note that the response has ended without its answer."""
        code = _RATE_LIMIT if refused.response.http == 429 else _SERVER_ERROR
        error = {"code": code, "message": named(refused).message, "refused_because": refused.cause.value}
        self.told |= {"status": "failed", "error": error, "output": self.output.items}
        if refused.cause is Cause.CANCELLED:
            self.told |= {"status": "cancelled", "error": None}

    def finish(self, usages: Sequence[Usage], ledger: Json | list[Json]) -> None:
        is_cut = self._finish_reason == "length"
        num_reasoning = self._reasoning.count if self._reasoning is not None and self.output.num_reasoning else 0
        self.told |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.output.items,
            "usage": usage_of(usages, num_reasoning),
            "pdserve": ledger,
        }


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(24)}"


def envelope(asked: ResponseRequest, model: str) -> Json:
    """Return the members of a response that are known before its answer."""
    text, reasoning = asked.text, asked.reasoning
    conversation = asked.conversation_id
    return {
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued",
        "background": bool(asked.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "conversation": {"id": conversation} if conversation else None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.is_stored,
        "temperature": asked.temperature,
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [{"strict": None, **tool} for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
        "metadata": asked.metadata or {},
    }


def usage_of(usages: Sequence[Usage], num_reasoning: int) -> Json:
    usage = summed(usages)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def named(refused: Refused) -> Refused:
    """Return a refusal with the names that this API has for fields."""
    return errors.renaming(refused, _FIELDS)


def body_of(refused: Refused) -> bytes:
    return errors.body_of(named(refused))


def written(events: Sequence[Json]) -> bytes:
    return b"".join([event(told) for told in events])
