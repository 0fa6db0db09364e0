"""The routes that generate, as plain ASGI: no framework between a chunk and its connection."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf

import msgspec
from starlette.types import Receive, Scope, Send

from pdserve.base.errors import echo
from pdserve.base.ids import new_request_id
from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import CLIENT_GONE, Cause, Refused, RefusedError, invalid
from pdserve.protocol.token_ids import TokenIds
from pdserve.router.frontend.answer import Answer
from pdserve.router.frontend.anthropic.fields import CountTokensRequest, MessagesRequest, check_version
from pdserve.router.frontend.anthropic.response import MessagesResponse
from pdserve.router.frontend.clients import Visit, bearer
from pdserve.router.frontend.intake import Intake, Preparing
from pdserve.router.frontend.openai import filters
from pdserve.router.frontend.openai.dialect import CHAT, COMPLETION, Choice, Dialect, Prompt, Response, Shown
from pdserve.router.frontend.openai.errors import JSON, Header
from pdserve.router.frontend.openai.fields import ChatRequest, CompletionRequest, Generation
from pdserve.router.frontend.openai.infilled import infilling
from pdserve.router.frontend.openai.reply import AnyResponse, Stream, Whole, respond
from pdserve.router.frontend.openai.translate import (
    Headers,
    chat_of,
    chat_request,
    completion_template,
    label_of,
    prompts_of,
    said_in,
    with_prompt,
    with_texts,
)
from pdserve.router.frontend.responses.fields import ResponseRequest
from pdserve.text.infilling import ROLES

IGNORED_FIELDS = b"x-ignored-fields"
MAX_IGNORED_BYTES = 1024  # of that header
REQUEST_ID = b"x-request-id"
Asked = Generation | MessagesRequest | ResponseRequest
BEGIN = "x-begin"  # "at-once": send a stream's headers before the first token
MAX_CHOICES = 256  # of a call
MAX_TOKEN_BODY_BYTES = 1 << 20  # of a text whose tokens are wanted


class Generator:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def chat(self, asked: ChatRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/chat/completions. Raises what `errors.refused_by` knows."""
        request = chat_request(asked, headers_of(scope))
        plan = filters.plan(asked, request, self._intake.model)
        shown = _shown(asked, logprobs=bool(asked.logprobs))
        last = request.chat.messages[-1]
        begun = last.content if asked.echo and last.role == "assistant" else ""
        choices = choices_of(plan, request.sampling.n or 1, echo=begun)
        reply = self._reply(asked, scope, self._response(asked, CHAT, shown), [choices])
        await self._serve(reply, [request], scope, send, plan, asked)

    async def message(self, asked: MessagesRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/messages. Raises what `errors.refused_by` knows."""
        check_version(headers_of(scope).get("anthropic-version"))
        response = MessagesResponse(self._intake.model.name_for(asked.model), self._intake.max_model_len())
        await self.converse(asked.chat(), asked, lambda _plan: response, scope, send)

    async def converse(
        self,
        chat: ChatRequest,
        asked: Asked,
        begun: Callable[[filters.Plan], AnyResponse],
        scope: Scope,
        send: Send,
    ) -> None:
        """Serve a chat that another API has asked for; `begun` makes its response. Less room makes a shorter answer."""
        request, plan = self.planned(chat, headers_of(scope))
        reply = self._reply(chat, scope, begun(plan), [choices_of(plan)])
        await self._serve(reply, [request], scope, send, plan, asked)

    def planned(self, chat: ChatRequest, headers: Headers) -> tuple[inference.GenerateRequest, filters.Plan]:
        """Return the request of another API's chat, and how its answer is filtered."""
        request = chat_request(chat, headers)
        request.sampling.fill_model_len = True
        return request, filters.plan(chat, request, self._intake.model)

    async def count_tokens(self, asked: CountTokensRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/messages/count_tokens. Raises what `errors.refused_by` knows."""
        check_version(headers_of(scope).get("anthropic-version"))
        token_ids = await tokenized(self._intake, scope, inference.GenerateRequest(chat=chat_of(asked.chat())))
        await respond(send, 200, msgspec.json.encode({"input_tokens": len(token_ids)}), JSON)

    async def complete(self, asked: CompletionRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/completions. Raises what `errors.refused_by` knows."""
        template, prompts = completion_template(asked, headers_of(scope)), prompts_of(asked.prompt)
        each = template.sampling.n or 1
        if each * len(prompts) > MAX_CHOICES:
            raise invalid("n", f"{each * len(prompts)} choices of all prompts are over the limit of {MAX_CHOICES}")
        plan = filters.plan(asked, template, self._intake.model)
        if asked.suffix:
            plan = infilling(asked, template, plan, self._intake.model)
        shown = _shown(asked, logprobs=asked.logprobs is not None, answer=asked.max_tokens != 0)
        texts = [self._text_of(prompt) if asked.echo else "" for prompt in prompts]
        choices = [choices_of(plan, each, place * each, text) for place, text in enumerate(texts)]
        reply = self._reply(asked, scope, self._response(asked, COMPLETION, shown), choices)
        # A generator: a field that all requests share is checked with the first, before the template is copied again.
        requests = (
            with_texts(template, ROLES, (str(prompt), asked.suffix)) if asked.suffix else with_prompt(template, prompt)
            for prompt in prompts
        )
        await self._serve(reply, requests, scope, send, plan, asked)

    def _text_of(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._intake.model.tokenizer.decode(prompt)

    def _response(self, asked: Generation, dialect: Dialect, shown: Shown) -> Response:
        return Response(dialect, self._intake.model.name_for(asked.model), self._intake.model.tokenizer, shown)

    def _reply(
        self, asked: Generation, scope: Scope, response: AnyResponse, choices: Sequence[list[Choice]]
    ) -> Whole | Stream:
        given = headers_of(scope)
        label = label_of(asked, given) or new_request_id().hex()
        headers: list[Header] = [(REQUEST_ID, label.encode())]
        connection = scope["state"]["connection"]
        if not asked.stream:
            return Whole(connection, response, headers, choices)
        begins_at_once = given.get(BEGIN) == "at-once"
        cycle = scope["state"]["cycle"]
        headers += scope["state"].get("for_page", ())  # a stream is not written with ASGI's `send`
        return Stream(connection, cycle, response, headers, choices, begins_at_once=begins_at_once)

    async def _serve(
        self,
        reply: Whole | Stream,
        requests: Iterable[inference.GenerateRequest],
        scope: Scope,
        send: Send,
        plan: filters.Plan,
        asked: Asked,
    ) -> None:
        preparing = preparing_of(plan)
        try:
            try:
                for part, request in zip(reply.parts, requests, strict=True):
                    await reply.begin_part(
                        part, self._intake, request, key_of(scope), scope["state"]["received_s"], preparing
                    )
            finally:
                answers = [part.answer for part in reply.parts if part.answer is not None]
                reply.headers += ignored(asked, plan, answers)  # known once the parameters of tools are compiled
            await reply.run(send)
        except RefusedError as error:
            scope["state"]["headers"] = reply.headers
            # Not kept in a variable: the error refers to this frame.
            raise RefusedError(plan.renamed(error.refused)) from None
        finally:
            reply.close(self._intake)


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by name. The last one of a name counts, except that tracestate is a list."""
    headers: dict[str, str] = {}
    for name, value in ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]):
        headers[name] = f"{headers[name]},{value}" if name == "tracestate" and name in headers else value
    return headers


def key_of(scope: Scope) -> bytes | None:
    """Return the API key in a request's headers, None if there is none: a bearer's, or Anthropic's x-api-key."""
    for name, value in scope["headers"]:
        if name == b"x-api-key" and value:
            return bytes(value)
    return bearer((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])


@asynccontextmanager
async def visiting(intake: Intake, scope: Scope) -> AsyncIterator[Visit]:
    """Count a call as a request of its tenant. Raises RefusedError."""
    visit = await intake.clients.visit(intake.clients.identify(key_of(scope)))
    try:
        yield visit
    finally:
        visit.end()


async def tokenized(intake: Intake, scope: Scope, request: inference.GenerateRequest) -> TokenIds:
    """Return a prompt's tokens. That counts against a tenant's limits, as generation does. Raises RefusedError."""
    async with visiting(intake, scope) as visit:
        token_ids = await intake.prompts.tokenize(request, intake.max_model_len(), inf)
        visit.spend(len(token_ids))
        return token_ids


def check_head(scope: Scope) -> None:
    """Raise RefusedError if a request's body will be over the limit, or is compressed."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > PUBLIC_MESSAGE_BYTES:
            raise too_large(int(value))
        if name == b"content-encoding" and value.lower() != b"identity":
            shown = echo(value.decode("latin-1"))
            raise RefusedError(
                Refused(Cause.MEDIA_TYPE, f"content-encoding: {shown} is not read here; send the body as it is")
            )


async def read_body(receive: Receive) -> bytes:
    """Return a request's body; RefusedError as soon as it is over the limit."""
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(CLIENT_GONE)
        parts.append(message["body"])
        num_bytes += len(message["body"])
        if num_bytes > PUBLIC_MESSAGE_BYTES:
            raise too_large(num_bytes)
        has_more = message["more_body"]
    return b"".join(parts)


def too_large(num_bytes: int, limit: int = PUBLIC_MESSAGE_BYTES, path: str = "") -> RefusedError:
    """Return the error for a body of at least so many bytes."""
    text = f"body: {num_bytes} bytes are over the limit of {limit}"
    return RefusedError(Refused(Cause.TOO_LARGE, f"{text} of {path}" if path else text))


def _shown(asked: Generation, *, logprobs: bool, answer: bool = True) -> Shown:
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise invalid("stream_options", "they go with stream true")
    if asked.stream and asked.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "they go with stream false")
    always = options is not None and bool(options.continuous_usage_stats)
    return Shown(
        usage=options is not None and bool(options.include_usage),
        usage_always=always,
        logprobs=logprobs,
        token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        prompt_logprobs=asked.prompt_logprobs is not None,
        answer=answer,
    )


def choices_of(plan: filters.Plan, num_choices: int = 1, first: int = 0, echo: str = "") -> list[Choice]:
    """Return the choices of one prompt, whose text begins with `echo`."""
    new_filter, prompt = plan.new_filter, Prompt(echo)
    return [Choice(first + place, prompt, None if new_filter is None else new_filter()) for place in range(num_choices)]


def preparing_of(plan: filters.Plan) -> Preparing:
    """Return what is done in the way of this API to a request."""
    loosen = None if plan.grammar is None else plan.grammar.loosen
    return Preparing(loosen, plan.template, partial(said_in, plan))


def ignored(asked: Asked, plan: filters.Plan, answers: Sequence[Answer]) -> list[Header]:
    """Return a header with the names of unknown fields, and of fields and parts of schemas without effect."""
    names = [*asked.ignored, *(plan.grammar.ignored if plan.grammar is not None else ())]
    names += dict.fromkeys(f"{plan.constrained_by}.{name}" for answer in answers for name in answer.ignored)
    return ignored_names(names)


def ignored_names(names: Sequence[str]) -> list[Header]:
    """Return a header with names of what is ignored, if anything is."""
    shown = ", ".join(name if name.isascii() and name.isprintable() else ascii(name) for name in names)
    return [(IGNORED_FIELDS, shown.encode()[:MAX_IGNORED_BYTES])] if names else []
