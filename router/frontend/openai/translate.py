"""Translates HTTP requests to GenerateRequest, the one message that is checked and admitted."""

import json
from collections.abc import Mapping, Sequence

from pdserve.base.errors import echo
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.openai.agents import hints_of, session_of
from pdserve.router.frontend.openai.body import Object
from pdserve.router.frontend.openai.dialect import merged
from pdserve.router.frontend.openai.fields import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    Served,
    TokenizeRequest,
)
from pdserve.router.frontend.openai.filters import Plan
from pdserve.router.frontend.openai.tools import offered
from pdserve.router.frontend.terms import usable_label

SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("logit_bias", "prompt_logprobs", "allowed_token_ids", "bad_words", "n"),
)
LABEL, PRIORITY, TTFT, TPOT = "x-request-id", "x-request-priority", "x-slo-ttft-ms", "x-slo-tpot-ms"
Headers = Mapping[str, str]


def chat_request(body: ChatRequest, headers: Headers) -> inference.GenerateRequest:
    """Return a conversation's request; RefusedError(INVALID_ARGUMENT) names a wrong field."""
    request = _request(body, headers)
    if not body.messages:
        raise invalid("messages", "it is empty, at least 1 message is needed")
    request.chat.CopyFrom(chat_of(body))
    if body.max_completion_tokens is not None:
        request.sampling.max_tokens = body.max_completion_tokens
    if not request.sampling.HasField("max_tokens"):
        request.sampling.fill_model_len = True
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "goes with logprobs true")
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    return request


def completion_template(body: CompletionRequest, headers: Headers) -> inference.GenerateRequest:
    """Return the part that the requests of all prompts share; RefusedError(INVALID_ARGUMENT) names a wrong field."""
    if body.best_of not in (None, body.n or 1):
        raise invalid("best_of", f"{body.best_of} is not n: all continuations are returned, none is left out")
    template = _request(body, headers)
    if body.add_special_tokens is not None:
        template.add_special_tokens = body.add_special_tokens
    if body.logprobs is not None:
        template.sampling.logprobs = body.logprobs
        if body.echo:
            template.sampling.prompt_logprobs = body.logprobs
    if body.max_tokens == 0 and body.echo:
        template.sampling.max_tokens = 1  # the token is computed, but not shown
    return template


def with_texts(
    template: inference.GenerateRequest, roles: Sequence[str], texts: Sequence[str]
) -> inference.GenerateRequest:
    """Return a request whose prompt is a chat of these texts, which a chat template of their own writes."""
    messages = [inference.ChatMessage(role=role, content=text) for role, text in zip(roles, texts, strict=True)]
    request = inference.GenerateRequest(chat=inference.Chat(messages=messages))
    request.MergeFrom(template)
    return request


def with_prompt(template: inference.GenerateRequest, prompt: str | Sequence[int]) -> inference.GenerateRequest:
    request = inference.GenerateRequest()
    request.CopyFrom(template)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def prompts_of(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    field: str = "prompt",
    limit: int = MAX_PROMPTS,
) -> list[str | Sequence[int]]:
    """Return the prompts of one call; RefusedError(INVALID_ARGUMENT) for none or too many."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]  # all of them are
    if not 1 <= len(prompt) <= limit:
        raise invalid(field, f"{len(prompt)} {field}s are outside [1, {limit}]")
    return list(prompt)  # type: ignore[arg-type]


def chat_of(body: ChatRequest | TokenizeRequest) -> inference.Chat:
    """Return the conversation, with the arguments of its template."""
    kwargs = dict(body.chat_template_kwargs or {})
    documents: list[Object] | None = None
    if isinstance(body, ChatRequest):
        documents = body.documents
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    tools = offered(body) if isinstance(body, ChatRequest) else body.tools
    return inference.Chat(
        messages=[_message(message, place) for place, message in enumerate(body.messages or ())],
        tools_json=_json(tools),
        documents_json=_json(documents),
        template_kwargs_json=_json(kwargs),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def said_in(plan: Plan, text: str) -> inference.ChatMessage:
    """Return the message that clients take an answer for, and send back with the next turn."""
    if plan.new_filter is None:
        return inference.ChatMessage(role="assistant", content=text)
    each = plan.new_filter()
    deltas = [*each.push(text), *each.finish("stop")[0]]
    return _message(Message.model_validate(merged(deltas)), 0)


def label_of(body: Served, headers: Headers) -> str:
    """Return the client's name for a request, empty if there is none that can be kept."""
    return usable_label(body.request_id or headers.get(LABEL, ""))


def _request(body: Generation, headers: Headers) -> inference.GenerateRequest:
    given = {name: value for name in SAME_NAMES if (value := getattr(body, name)) is not None}
    request, stop = served_request(body, headers), body.stop
    request.stop.extend([stop] if isinstance(stop, str) else stop or ())
    if body.nvext is not None:
        body.nvext.check_refused("nvext.")
    hints = hints_of(body)
    request.session, request.output_tokens = session_of(body, headers), hints.osl or 0
    request.prepare_next = bool(hints.speculative_prefill)
    if hints.priority is not None:
        request.priority = hints.priority
    request.sampling.CopyFrom(
        inference.SamplingParams(
            **given,
            top_k=None if body.top_k is None else max(0, body.top_k),
            seed=None if body.seed is None else body.seed % 2**64,
            max_tokens=body.max_tokens,
        )
    )
    return request


def served_request(body: Served, headers: Headers) -> inference.GenerateRequest:
    """Return a request without its prompt and sampling; RefusedError(INVALID_ARGUMENT) names a wrong field."""
    body.check_refused()
    request = inference.GenerateRequest(
        model=body.model or "",
        tenant=body.tenant or "",
        priority=_priority(headers) if body.priority is None else body.priority,
        deadline_ms=body.deadline_ms,
        request_label=label_of(body, headers),
        traceparent=headers.get("traceparent", ""),
        tracestate=headers.get("tracestate", ""),
    )
    ttft_ms, tpot_ms = (body.slo.ttft_ms, body.slo.tpot_ms) if body.slo else (None, None)
    ttft_ms = _number(headers, TTFT) if ttft_ms is None else ttft_ms
    tpot_ms = _number(headers, TPOT) if tpot_ms is None else tpot_ms
    if ttft_ms is not None:
        request.slo.ttft_ms = ttft_ms
    if tpot_ms is not None:
        request.slo.tpot_ms = tpot_ms
    return request


def _number(headers: Headers, name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise invalid(name, f"{echo(text, repr)} is no number") from error


def _priority(headers: Headers) -> int:
    number = _number(headers, PRIORITY) or 0.0
    if not (number.is_integer() and -(2**31) <= number < 2**31):
        raise invalid(PRIORITY, f"{number} is no whole number of 32 bits")
    return int(number)


def _message(message: Message, place: int) -> inference.ChatMessage:
    return inference.ChatMessage(
        role=message.role,
        content=_text(message, place),
        tool_calls_json=_json(message.tool_calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning_content=message.reasoning_content or message.reasoning or "",
    )


def _text(message: Message, place: int) -> str | None:
    if message.content is None and message.role == "assistant":
        return message.refusal
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in message.content:
        text = part.text if part.type in ("text", "input_text") else None
        if part.type == "refusal" and message.role == "assistant":
            text = part.refusal
        if text is None:
            problem = f"parts of type {echo(part.type, repr)} are not supported; 'text' is"
            raise invalid(f"messages[{place}].content", problem)
        texts.append(text)
    return "\n".join(texts)


def _json(value: object) -> str:
    return json.dumps(value) if value else ""
