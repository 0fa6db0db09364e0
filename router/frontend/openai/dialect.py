"""The JSON of responses: chat.completion and text_completion, whole or in chunks.

Most chunks of a stream differ only in their text, so the bytes around the text are made once.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import logprobs_to_proto
from pdserve.protocol.refusal import Refused
from pdserve.protocol.reports import FINISH_REASONS
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.errors import body_of
from pdserve.router.frontend.openai.filters import Delta, MessageFilter
from pdserve.router.frontend.openai.logprobs import TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from pdserve.router.requests.timeline import Ledger, Usage
from pdserve.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
Json = dict[str, Any]
_SHOWN = [each.name for each in fields(Ledger) if each.name != "steps"]
encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Shown:
    """What a request wants to see besides the text."""

    usage: bool = False  # the stream's last chunk has it
    usage_always: bool = False  # every chunk has it
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # in log probabilities
    prompt_logprobs: bool = False
    answer: bool = True  # False: the prompt alone


@dataclass(slots=True)
class Prompt:
    """What a response may show about a prompt."""

    echo: str = ""  # the text begins with this
    token_ids: Sequence[int] = ()
    logprobs: list[inference.TokenLogprobs] = field(default_factory=list)  # from the second token on

    def take(self, gain: Gain) -> None:
        """Keep the log probabilities that a gain brought."""
        for part in gain.prompt_logprobs:
            self.logprobs += map(logprobs_to_proto, part.entries())


@dataclass(slots=True)
class Choice:
    """One choice of a response so far."""

    index: int
    prompt: Prompt
    filter: MessageFilter | None = None
    num_chars: int = 0  # of the tokens so far: where the next token's text begins
    finish_reason: str | None = None
    stop_match: str | int | None = None
    is_begun: bool = False  # a chunk was written
    end_is_shown: bool = False
    before_text: bytes = b""  # in a chunk, made once

    def deltas(self, gain: Gain) -> list[Delta]:
        """Return the message's deltas for a gain, and keep the finish reason."""
        gained: list[Delta] = []
        if self.filter is not None:
            gained = self.filter.push(gain.text) if gain.text else []
        elif gain.text:
            gained = [{"content": gain.text}]
        if gain.finish_reason:
            self.finish_reason, self.stop_match = FINISH_REASONS[gain.finish_reason], gain.stop_match
            if self.filter is not None:
                last, self.finish_reason = self.filter.finish(self.finish_reason)
                gained += last
        return gained


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one of the two kinds of response is written."""

    id_prefix: str
    whole: str  # name of the object
    chunk: str
    before_text: bytes  # in a chunk's choice, after its index
    after_text: bytes
    part: Callable[[Delta], Json]  # a choice's own field in a chunk
    result: Callable[[list[Delta]], Json]  # and in a whole response
    logprobs: Callable[[TokenNames, Sequence[int], Sequence[inference.TokenLogprobs], int], Json]
    is_chat: bool


def merged(deltas: Sequence[Delta]) -> Json:
    """Return the whole message that deltas make."""
    message: Json = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            _add_call(calls.setdefault(call["index"], {"id": "", "type": "function", "function": {}}), call)
    if calls:
        message["tool_calls"] = list(calls.values())
    elif message["content"] is None:
        message["content"] = ""
    return message


def _add_call(call: Json, delta: Json) -> None:
    call["id"] = delta.get("id") or call["id"]
    for name, text in delta.get("function", {}).items():
        call["function"][name] = call["function"].get(name, "") + (text or "")


CHAT = Dialect(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    before_text=b',"delta":{"content":',
    after_text=b'},"logprobs":null,"finish_reason":null}',
    part=lambda delta: {"delta": delta},
    result=lambda deltas: {"message": {**merged(deltas), "refusal": None}},
    logprobs=chat_logprobs,
    is_chat=True,
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    before_text=b',"text":',
    after_text=b',"logprobs":null,"finish_reason":null}',
    part=lambda delta: {"text": delta.get("content", "")},
    result=lambda deltas: {"text": "".join(delta["content"] for delta in deltas)},
    logprobs=completion_logprobs,
    is_chat=False,
)


class Response:
    """One response: its envelope, and how its choices are written."""

    def __init__(self, dialect: Dialect, model: str, tokens: Tokenizer, shown: Shown) -> None:
        self.dialect = dialect
        self.shown = shown
        self.num_tokens = 0  # given out
        self.num_prompt_tokens = 0
        self.settle = None
        self.id = dialect.id_prefix + secrets.token_hex(16)
        self._names = TokenNames(tokens, shown.tokens_as_ids)
        self._is_text_alone = shown.answer and not (shown.usage_always or shown.logprobs or shown.token_ids)
        self._envelope = {"id": self.id, "created": int(time.time()), "model": model}
        head = encode({**self._envelope, "object": dialect.chunk})[:-1]
        self._before = b"data: " + head + b',"choices":['
        self._after = b'],"usage":null}\n\n' if shown.usage else b"]}\n\n"
        self._after_text = dialect.after_text + self._after

    def chunks(self, choice: Choice, gain: Gain) -> bytes:
        gain = self._seen(choice, gain)
        if not (gain.token_ids or gain.text or gain.finish_reason):
            return b""  # the gain is about the prompt only
        if choice.is_begun and choice.filter is None and self._is_text_alone and not gain.finish_reason:
            return self._text(choice, gain.text) if gain.text else b""
        events = [] if choice.is_begun else self._beginning(choice)
        choice.is_begun = True
        deltas, more = choice.deltas(gain), self._more(choice, gain)
        if more and not deltas:
            deltas = [{}]
        for delta in deltas:
            events.append(self._event(choice, delta, more))
            more = {}
        return b"".join(events)

    def last_chunk(self, choice: Choice, ledger: Json | None) -> bytes:
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_match}
        return self._event(choice, {}, end, None if ledger is None else {"pdserve": ledger})

    def end(self, usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        """Return what ends a stream: the chunk with the usage, if it is to be shown, and OpenAI's last event."""
        if not self.shown.usage:
            return DONE
        usage = total(usages, answer=self.shown.answer)
        return self._before + b"]," + encode({"usage": usage, "pdserve": ledger})[1:] + b"\n\n" + DONE

    def refused(self, refused: Refused) -> bytes:
        return b"data: " + body_of(refused) + b"\n\n" + DONE

    def body(self, choices: Sequence[tuple[Choice, Gain]], usages: Sequence[Usage], ledger: Json | list[Json]) -> bytes:
        usage = total(usages, answer=self.shown.answer)
        results = [self._result(choice, self._seen(choice, gain)) for choice, gain in choices]
        about = self._about(choices[0][0].prompt) if self.dialect.is_chat else {}
        envelope = {**self._envelope, "object": self.dialect.whole, "choices": results, "usage": usage}
        return encode({**envelope, **about, "pdserve": ledger})

    def _seen(self, choice: Choice, gain: Gain) -> Gain:
        choice.prompt.take(gain)
        if not self.shown.answer:
            return Gain(gain.index, finish_reason=inference.FINISH_REASON_LENGTH if gain.finish_reason else 0)
        self.num_tokens += len(gain.token_ids)
        return gain

    def _text(self, choice: Choice, text: str) -> bytes:
        if not choice.before_text:
            choice.before_text = self._before + b'{"index":%d' % choice.index + self.dialect.before_text
        return choice.before_text + encode(text) + self._after_text

    def _event(self, choice: Choice, delta: Delta, more: Json, beside: Json | None = None) -> bytes:
        part = {
            "index": choice.index,
            **self.dialect.part(delta),
            "logprobs": None,
            "finish_reason": None,
            **more,
        }
        if self.shown.usage_always:
            beside = {**(beside or {}), "usage": usage_of(self.num_prompt_tokens, self.num_tokens)}
        after = self._after if beside is None else b"]," + encode(beside)[1:] + b"\n\n"
        return self._before + encode(part) + after

    def _beginning(self, choice: Choice) -> list[bytes]:
        prompt = choice.prompt
        shown: Json = {"prompt_token_ids": list(prompt.token_ids)} if self.shown.token_ids else {}
        if self.dialect.is_chat:
            content = None if choice.filter is not None and choice.filter.may_call else ""
            return [self._event(choice, {"role": "assistant", "content": prompt.echo or content}, {}, shown or None)]
        if not prompt.echo and not shown:
            return []
        if prompt.echo and self.shown.logprobs:
            shown["logprobs"] = self._echoed(prompt)
        choice.num_chars = len(prompt.echo)
        return [self._event(choice, {"content": prompt.echo}, shown)]

    def _more(self, choice: Choice, gain: Gain) -> Json:
        more: Json = {}
        if self.shown.logprobs and gain.logprobs:
            more["logprobs"] = self.dialect.logprobs(self._names, gain.token_ids, gain.logprobs, choice.num_chars)
            choice.num_chars += self._names.num_chars(gain.token_ids)
        if self.shown.token_ids and gain.token_ids:
            more["token_ids"] = gain.token_ids
        return more

    def _echoed(self, prompt: Prompt) -> Json:
        return completion_logprobs(self._names, prompt.token_ids, [None, *prompt.logprobs])

    def _about(self, prompt: Prompt) -> Json:
        """Return what a whole response shows about a prompt."""
        about: Json = {}
        if self.shown.token_ids:
            about["prompt_token_ids"] = list(prompt.token_ids)
        if self.shown.prompt_logprobs:
            about["prompt_logprobs"] = prompt_logprobs(self._names.tokenizer, prompt.token_ids, prompt.logprobs)
        return about

    def _result(self, choice: Choice, gain: Gain) -> Json:
        deltas, prompt = choice.deltas(gain), choice.prompt
        choice.num_chars = len(prompt.echo)
        result: Json = {"index": choice.index, "logprobs": None}
        result |= self._more(choice, gain)
        if prompt.echo and self.shown.logprobs and not self.dialect.is_chat:
            before, after = self._echoed(prompt), result["logprobs"] or {}
            result["logprobs"] = {name: values + after.get(name, []) for name, values in before.items()}
        if prompt.echo:
            deltas.insert(0, {"content": prompt.echo})
        if not self.dialect.is_chat:
            result |= self._about(prompt)
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_match}
        return {**result, **self.dialect.result(deltas), **end}


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Json:
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def total(usages: Sequence[Usage], *, answer: bool) -> Json:
    """Return the usage of all requests of a call."""
    usage = summed(usages)
    return usage_of(usage.prompt_tokens, usage.completion_tokens if answer else 0, usage.cached_tokens)


def summed(usages: Sequence[Usage]) -> Usage:
    """Return the usage of several requests together."""
    return Usage(
        sum(each.prompt_tokens for each in usages),
        sum(each.completion_tokens for each in usages),
        sum(each.cached_tokens for each in usages),
    )


def event(told: Json) -> bytes:
    """Return a server-sent event with the name that its JSON has as `type`."""
    return b"event: %s\ndata: %s\n\n" % (told["type"].encode(), encode(told))


def ledger_of(request_id: str, ledger: Ledger) -> Json:
    """Return a request's ledger for the client: when each stage was reached, and which workers served it."""
    shown = {name: getattr(ledger, name) for name in _SHOWN}
    shown["moves"] = [asdict(moved) for moved in ledger.moves]
    shown["drafts"] = {source: asdict(counted) for source, counted in ledger.drafts.items()}
    timings_ms = {stage.value: round(at_ms, 3) for stage, at_ms in ledger.steps}
    return {"request_id": request_id, **shown, "timings_ms": timings_ms}
