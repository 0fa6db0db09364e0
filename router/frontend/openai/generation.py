"""POST /v1/chat/completions and /v1/completions, as plain ASGI: no framework between a chunk and its connection."""

from collections.abc import Iterable, Sequence

from starlette.types import Receive, Scope, Send

from pdserve.errors import RequestError, Status, echo, invalid
from pdserve.ids import new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.clients import bearer
from pdserve.router.frontend.intake import NOT_SERVED, Intake
from pdserve.router.frontend.openai import filters
from pdserve.router.frontend.openai.dialect import CHAT, COMPLETION, Choice, Dialect, Prompt, Response, Shown
from pdserve.router.frontend.openai.errors import Header, HttpError, error_of
from pdserve.router.frontend.openai.fields import ChatRequest, CompletionRequest, Generation
from pdserve.router.frontend.openai.reply import Stream, Whole
from pdserve.router.frontend.openai.translate import (
    chat_request,
    completion_template,
    label_of,
    prompts_of,
    with_prompt,
)
from pdserve.rpc import PUBLIC_MESSAGE_BYTES

IGNORED_FIELDS = b"x-ignored-fields"
MAX_IGNORED_BYTES = 1024  # of that header
REQUEST_ID = b"x-request-id"
BEGIN = "x-begin"  # "at-once": send a stream's headers before the first token
MAX_CHOICES = 256  # of a call


class Generator:
    """Serves the two routes."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def chat(self, scope: Scope, body: bytes, send: Send) -> None:
        """Serve POST /v1/chat/completions. Raises what `errors.error_of` knows."""
        asked, headers = ChatRequest.model_validate_json(body), headers_of(scope)
        request = chat_request(asked, headers)
        plan = filters.plan(asked, request, self._intake.model)
        shown = _shown(asked, logprobs=bool(asked.logprobs))
        choices = _choices(request.sampling.n or 1, 0, plan, Prompt())
        reply = self._reply(asked, scope, CHAT, shown, [choices])
        await self._serve(reply, [request], scope, send, plan, asked)

    async def complete(self, scope: Scope, body: bytes, send: Send) -> None:
        """Serve POST /v1/completions. Raises what `errors.error_of` knows."""
        asked, headers = CompletionRequest.model_validate_json(body), headers_of(scope)
        template, prompts = completion_template(asked, headers), prompts_of(asked.prompt)
        each = template.sampling.n or 1
        if each * len(prompts) > MAX_CHOICES:
            raise invalid("n", f"{each * len(prompts)} choices of all prompts are over the limit of {MAX_CHOICES}")
        plan = filters.plan(asked, template, self._intake.model)
        shown = _shown(asked, logprobs=asked.logprobs is not None, answer=asked.max_tokens != 0)
        texts = [self._text_of(prompt) if asked.echo else "" for prompt in prompts]
        choices = [_choices(each, place * each, plan, Prompt(text)) for place, text in enumerate(texts)]
        reply = self._reply(asked, scope, COMPLETION, shown, choices)
        # A generator: a field that all requests share is checked with the first, before the template is copied again.
        requests = (with_prompt(template, prompt) for prompt in prompts)
        await self._serve(reply, requests, scope, send, plan, asked)

    def _text_of(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._intake.model.tokenizer.decode(prompt)

    def _reply(
        self, asked: Generation, scope: Scope, dialect: Dialect, shown: Shown, choices: Sequence[list[Choice]]
    ) -> Whole | Stream:
        model, given = self._intake.model, headers_of(scope)
        response = Response(dialect, model.name, model.tokenizer, shown)
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
        asked: Generation,
    ) -> None:
        loosen = None if plan.grammar is None else plan.grammar.loosen
        try:
            try:
                for part, request in zip(reply.parts, requests, strict=True):
                    await reply.open(part, self._intake, request, key_of(scope), scope["state"]["received_s"], loosen)
            finally:
                reply.headers += _ignored(asked, plan, reply)  # known once the parameters of tools are compiled
            await reply.run(send)
        except (HttpError, *NOT_SERVED) as error:
            # Not kept in a variable: the error refers to this frame.
            raise _shown_error(error, plan.constrained_by, reply.headers) from None
        finally:
            reply.close(self._intake)


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by name. The last one of a name counts, except that tracestate is a list."""
    headers: dict[str, str] = {}
    for name, value in ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]):
        headers[name] = f"{headers[name]},{value}" if name == "tracestate" and name in headers else value
    return headers


def key_of(scope: Scope) -> bytes | None:
    """Return the API key in a request's headers, None if there is none."""
    return bearer((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])


def check_head(scope: Scope) -> None:
    """Raise HttpError if a request's body will be over the limit, or is compressed."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > PUBLIC_MESSAGE_BYTES:
            raise too_large(int(value))
        if name == b"content-encoding" and value.lower() != b"identity":
            shown = echo(value.decode("latin-1"))
            raise HttpError(415, f"content-encoding: {shown} is not read here; send the body as it is")


async def read_body(receive: Receive) -> bytes:
    """Return a request's body; HttpError as soon as it is over the limit."""
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError(Status.CANCELLED, "the client has left")
        parts.append(message["body"])
        num_bytes += len(message["body"])
        if num_bytes > PUBLIC_MESSAGE_BYTES:
            raise too_large(num_bytes)
        has_more = message["more_body"]
    return b"".join(parts)


def too_large(num_bytes: int) -> HttpError:
    """Return the error for a body of at least so many bytes."""
    close = ((b"connection", b"close"),)  # the rest of the body is not read
    return HttpError(413, f"body: {num_bytes} bytes are over the limit of {PUBLIC_MESSAGE_BYTES}", headers=close)


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


def _shown_error(error: Exception, constrained_by: str, headers: Iterable[Header]) -> HttpError:
    shown = error_of(error)
    filters.rename(shown, constrained_by)
    shown.headers = (*shown.headers, *headers)
    return shown


def _choices(num_choices: int, first: int, plan: filters.Plan, prompt: Prompt) -> list[Choice]:
    new_filter = plan.new_filter
    return [Choice(first + place, prompt, None if new_filter is None else new_filter()) for place in range(num_choices)]


def _ignored(asked: Generation, plan: filters.Plan, reply: Whole | Stream) -> list[Header]:
    """Return a header with the names of unknown fields, and of fields and parts of schemas without effect."""
    names = [*asked.ignored, *(plan.grammar.ignored if plan.grammar is not None else ())]
    for group, part in (("stream_options", asked.stream_options), ("slo", asked.slo)):
        names += [f"{group}.{name}" for name in (part.ignored if part is not None else ())]
    answers = [part.answer for part in reply.parts if part.answer is not None]
    names += dict.fromkeys(f"{plan.constrained_by}.{name}" for answer in answers for name in answer.ignored)
    shown = ", ".join(name if name.isascii() and name.isprintable() else ascii(name) for name in names)
    return [(IGNORED_FIELDS, shown.encode()[:MAX_IGNORED_BYTES])] if names else []
