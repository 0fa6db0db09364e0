"""The JSON of an answer as Anthropic's clients know it: content blocks, whole or as events, and errors.

The order of events is that of Anthropic's documentation: message_start; for each block, one after the other, its start,
its deltas and its stop; message_delta with the reason of the end and the usage; message_stop.
"""

import secrets
from collections.abc import Sequence

from pdserve.protocol.refusal import Refused
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.dialect import Choice, Json, Shown, encode, event, summed
from pdserve.router.frontend.openai.errors import renaming
from pdserve.router.frontend.openai.filters import Delta
from pdserve.router.frontend.openai.tools import arguments_of
from pdserve.router.requests.timeline import Usage

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELDS = {  # as chats have them
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_DELTA = (  # an event of text, as `_gain` writes it
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"text_delta","text":%b}}\n\n'
)
_TEXTS = {"content": ("text", "text"), "reasoning_content": ("thinking", "thinking")}  # blocks, and their members


class MessagesResponse:
    """One response: a message, its blocks, and the events that bring them."""

    def __init__(self, model: str, max_model_len: int) -> None:
        """`max_model_len`: tokens that prompt and answer may have together."""
        self.shown = Shown()
        self.num_prompt_tokens = 0
        self.settle = None
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._max_model_len = max_model_len
        self._num_tokens = 0
        self._blocks: list[Json] = []  # begun
        self._open = ""  # the type of the block that goes on
        self._texts: list[str] = []  # of that block, or of the arguments of its call
        self._has_called = False  # with arguments that are an object
        self._end: Json = {}

    def chunks(self, choice: Choice, gain: Gain) -> bytes:
        self._num_tokens += len(gain.token_ids)
        if choice.filter is None and self._open == "text" and gain.text and not gain.finish_reason:
            return _DELTA % (len(self._blocks) - 1, encode(gain.text))
        events = b"" if choice.is_begun else self._start()
        choice.is_begun = True
        return events + b"".join([self._delta(delta) for delta in choice.deltas(gain)])

    def last_chunk(self, choice: Choice, ledger: Json | None) -> bytes:
        events = self._close()
        self._end = self._ending(choice)
        return events

    def end(self, usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        told = {"delta": self._end, "usage": _usage(usages), "pdserve": ledger}
        return _event("message_delta", told) + _event("message_stop", {})

    def refused(self, refused: Refused) -> bytes:
        return b"event: error\ndata: " + body_of(refused) + b"\n\n"

    def body(self, choices: Sequence[tuple[Choice, Gain]], usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        ((choice, gain),) = choices
        self._num_tokens += len(gain.token_ids)
        for delta in choice.deltas(gain):
            self._delta(delta)
        self._close()
        blocks = [
            block for block in self._blocks if block.get("input", {}) is not None
        ]  # no client could run a cut call
        told = {**self._ending(choice), "usage": _usage(usages), "pdserve": ledger}
        return encode({**self._message(), "content": blocks, **told})

    def _message(self) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}

    def _start(self) -> bytes:
        usage = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": {**self._message(), "content": [], **end, "usage": usage}})

    def _delta(self, delta: Delta) -> bytes:
        events = b""
        for name, (kind, member) in _TEXTS.items():
            if text := delta.get(name):
                events += b"" if self._open == kind else self._begin(_begun(kind))
                events += self._gain({"type": f"{kind}_delta", member: text}, text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._begin(_begun("tool_use", call))
            if text := call["function"].get("arguments"):
                events += self._gain({"type": "input_json_delta", "partial_json": text}, text)
        return events

    def _begin(self, block: Json) -> bytes:
        events = self._close()
        started = _event("content_block_start", {"index": len(self._blocks), "content_block": block})
        self._open = block["type"]
        self._blocks.append(block)
        return events + started

    def _gain(self, delta: Json, text: str) -> bytes:
        self._texts.append(text)
        return _event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        block, text = self._blocks[-1], "".join(self._texts)
        if self._open == "tool_use":
            block["input"] = arguments_of(text)
            self._has_called |= block["input"] is not None
        else:
            block[self._open] = text
        self._open, self._texts = "", []
        return _event("content_block_stop", {"index": len(self._blocks) - 1})

    def _ending(self, choice: Choice) -> Json:
        if choice.finish_reason == "length":
            is_full = self.num_prompt_tokens + self._num_tokens >= self._max_model_len
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if self._has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(choice.stop_match, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_match}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def body_of(refused: Refused) -> bytes:
    message = renaming(refused, _FIELDS).message
    kind = _ERRORS.get(refused.response.http, "invalid_request_error" if refused.response.http < 500 else "api_error")
    error = {"type": kind, "message": message, "refused_because": refused.cause.value}
    return encode({"type": "error", "error": error})


def _usage(usages: Sequence[Usage]) -> Json:
    """Return the usage: input_tokens are those that no cache had."""
    usage = summed(usages)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _begun(kind: str, call: Json | None = None) -> Json:
    if call is not None:
        return {"type": kind, "id": call["id"], "name": call["function"]["name"], "input": {}}
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def _event(name: str, told: Json) -> bytes:
    return event({"type": name, **told})
