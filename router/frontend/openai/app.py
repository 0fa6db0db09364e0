"""The routes of the HTTP endpoint. Generation is dispatched by hand; rare requests go through FastAPI."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

import pdserve
from pdserve.base.ids import new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.anthropic.fields import CountTokensRequest, MessagesRequest
from pdserve.router.frontend.anthropic.response import body_of as messages_body_of
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.models import Models
from pdserve.router.frontend.openai.document import (
    COUNT_INPUT,
    COUNT_TOKENS,
    EMBEDDINGS,
    MESSAGES,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    with_generation,
)
from pdserve.router.frontend.openai.embeddings import Embedder
from pdserve.router.frontend.openai.errors import body_of, headers_for, refused_by, response_of
from pdserve.router.frontend.openai.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    Served,
    TokenizeRequest,
)
from pdserve.router.frontend.openai.generation import (
    MAX_TOKEN_BODY_BYTES,
    REQUEST_ID,
    Generator,
    check_head,
    headers_of,
    key_of,
    read_body,
    tokenized,
    too_large,
    visiting,
)
from pdserve.router.frontend.openai.reply import respond
from pdserve.router.frontend.openai.scores import Scorer
from pdserve.router.frontend.openai.sites import Sites, adding, check_json
from pdserve.router.frontend.openai.translate import LABEL, chat_of
from pdserve.router.frontend.page import Page
from pdserve.router.frontend.prompts import check_ids, too_long
from pdserve.router.frontend.responses import routes as kept
from pdserve.router.frontend.responses.door import Responses
from pdserve.router.frontend.responses.response import body_of as responses_body_of
from pdserve.router.frontend.terms import usable_label
from pdserve.text.tokenizer import Tokenizer

OPEN = frozenset({"/health", "/ready", "/ping"})  # paths that need no API key
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TOKEN_PATHS = frozenset({TOKENIZE, DETOKENIZE, COUNT_TOKENS, COUNT_INPUT})
BODIES = {  # of errors, where they are not as chats have them
    **dict.fromkeys((MESSAGES, COUNT_TOKENS), messages_body_of),
    **dict.fromkeys((RESPONSES, COUNT_INPUT), responses_body_of),
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Serve = Callable[[Scope, bytes, Send], Awaitable[None]]
_Asked = TypeVar("_Asked", bound="Served | CountTokensRequest")
_Server = TypeVar("_Server")


class App:
    """The ASGI application."""

    def __init__(self, models: Models, config: EndpointConfig, responses: Responses) -> None:
        self._sites = Sites(config)
        rerank = _read(RerankRequest, models, Scorer, Scorer.rerank)
        score = _read(ScoreRequest, models, Scorer, Scorer.score)
        self._generation: dict[str, Serve] = {
            "/v1/chat/completions": _read(ChatRequest, models, Generator, Generator.chat),
            "/v1/completions": _read(CompletionRequest, models, Generator, Generator.complete),
            MESSAGES: _read(MessagesRequest, models, Generator, Generator.message),
            COUNT_TOKENS: _read(CountTokensRequest, models, Generator, Generator.count_tokens),
            RESPONSES: responses.create,
            COUNT_INPUT: responses.count,
            EMBEDDINGS: _read(EmbeddingsRequest, models, Embedder, Embedder.embed),
            POOLING: _read(PoolingRequest, models, Embedder, Embedder.embed),
            **dict.fromkeys((RERANK, "/rerank", "/v2/rerank"), rerank),
            **dict.fromkeys((SCORE, "/score"), score),
        }
        self._models = models
        self._pages = {
            intake: Page(intake.backend, intake.clients, [other.model.name for other in models if other is not intake])
            for intake in models
        }
        self.routes = routes(models, responses)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            if (refused := scope["state"].get("refused")) is not None:
                raise RefusedError(refused)
            if for_page := self._sites.headers(scope):
                scope["state"]["for_page"], send = for_page, adding(for_page, send)
            if (preflight := self._sites.preflight(scope)) is not None:
                await respond(send, 200, b"", preflight)
                return
            if scope["path"] not in OPEN:
                self._sites.check_host(scope)
            if scope["method"] == "HEAD":  # uvicorn leaves out the body of what the route writes
                scope, receive = {**scope, "method": "GET"}, _left
            await self._serve(scope, receive, send)
        except (RefusedError, ValueError) as error:
            await _end(refused_by(error), scope, send)
        finally:
            for name in ("connection", "cycle"):  # they refer to this scope: leave no cycle to the garbage collector
                scope["state"].pop(name, None)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if Page.serves(path):
            model = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[-1]
            await self._pages[self._models.shown(model)].app(dict(scope), receive, send)
            return
        if path not in OPEN:
            self._models.first.clients.identify(key_of(scope))
        check_head(scope)
        serve = self._generation.get(path)
        if scope["method"] != "POST":
            if serve is not None:
                scope["state"]["headers"] = [(b"allow", b"POST")]
                raise RefusedError(Refused(Cause.METHOD, f"{scope['method']} {path}: POST is needed"))
            await self.routes(dict(scope), receive, send)
            return
        check_json(scope)
        body = await read_body(receive)
        if path in TOKEN_PATHS and len(body) > MAX_TOKEN_BODY_BYTES:
            raise too_large(len(body), MAX_TOKEN_BODY_BYTES, path)
        if serve is not None:
            await serve(scope, body, send)
            return
        await self.routes(dict(scope), _again(body), send)


def _read(
    kind: type[_Asked],
    models: Models,
    server: Callable[[Intake], _Server],
    answer: Callable[[_Server, _Asked, Scope, Send], Awaitable[None]],
) -> Serve:
    """Return what reads a body of a kind, and lets the server of the model that it names answer it."""
    servers = {intake: server(intake) for intake in models}

    async def serve(scope: Scope, body: bytes, send: Send) -> None:
        asked = kind.model_validate_json(body)
        await answer(servers[models.of(asked.model)], asked, scope, send)  # type: ignore[arg-type]  # mypy widens Self

    return serve


async def _left() -> Message:
    """Tell a route that its client has left: a stream without a body need not go on."""
    return {"type": "http.disconnect"}


def _again(body: bytes) -> Receive:
    """Return an ASGI `receive` for a body that has been read."""

    async def receive() -> Any:  # noqa: ANN401 - ASGI's
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _end(refused: Refused, scope: Scope, send: Send) -> None:
    headers = [*headers_for(refused), *scope["state"].get("headers", ())]
    if not any(name == REQUEST_ID for name, _ in headers):
        label = usable_label(headers_of(scope).get(LABEL, "")) or new_request_id().hex()
        headers.append((REQUEST_ID, label.encode()))
    if scope["path"] in (MESSAGES, COUNT_TOKENS):
        headers += [(b"request-id", value) for name, value in headers if name == REQUEST_ID]
    body = BODIES.get(scope["path"], body_of)(refused)
    await respond(send, refused.response.http, body, headers)


def routes(models: Models, responses: Responses) -> FastAPI:
    """Return the routes besides generation; /openapi.json describes both."""
    app = FastAPI(title="pdserve", version=pdserve.__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _not_served)
    for kind in (RequestValidationError, RefusedError, ValueError):
        app.add_exception_handler(kind, _refused)
    _add_state(app, models)
    _add_models(app, models)
    _add_tokens(app, models)
    app.state.clients, app.state.responses = models.first.clients, responses
    app.include_router(kept.routes)
    app.openapi = partial(with_generation, app)  # type: ignore[method-assign]
    return app


async def _refused(_request: Request, error: Exception) -> Response:
    return response_of(refused_by(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    error.detail = f"{request.method} {request.url.path}: {error.detail}"
    return response_of(refused_by(error), error.headers)


def _add_state(app: FastAPI, models: Models) -> None:
    @app.get("/health")
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Whether this router lives."""
        return Response(status_code=200 if models.is_live else 503)

    @app.get("/ready")
    async def ready(model: str = "") -> Response:
        """Whether requests may come, to a model or to any: some pair of workers serves, or did lately."""
        is_ready = models.shown(model).backend.readiness().is_ready if model else models.is_ready
        return Response(status_code=200 if is_ready else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of pdserve."""
        return {"version": pdserve.__version__}

    @app.get("/metrics")
    async def metrics(model: str = "") -> Response:
        """Metrics of a model's router in Prometheus' text format; by default the first model's."""
        text = await models.shown(model).backend.metrics()
        if not text:
            raise HTTPException(404, "metrics are turned off")
        return Response(text, media_type=METRICS_TYPE)


def _add_models(app: FastAPI, models: Models) -> None:
    created = int(time.time())

    def card(intake: Intake, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "root": intake.model.name,
            "parent": intake.model.name if intake.adapter(name) else None,
            "max_model_len": intake.max_model_len(),
            "permission": [],
        }

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)
    async def list_models() -> dict[str, Any]:
        """The models that are served, each under all of its names, and their adapters."""
        return {"object": "list", "data": [card(intake, name) for intake in models for name in intake.names]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """A model."""
        return card(models.of(model), model)

    @app.post("/v1/load_lora_adapter", include_in_schema=False)
    @app.post("/v1/unload_lora_adapter", include_in_schema=False)
    async def adapters(call: Request) -> None:
        raise RefusedError(Refused(Cause.NO_ROUTE, f"POST {call.url.path}: LoRA adapters are not served yet"))


def _add_tokens(app: FastAPI, models: Models) -> None:
    """Add routes from text to tokens and back. Both count against a tenant's limits, as generation does."""

    @app.post(TOKENIZE)
    async def tokenize(body: TokenizeRequest, call: Request) -> Response:
        """The tokens of a text, or of a conversation as the model's template writes it."""
        intake = models.of(body.model)
        tokens = [] if body.prompt == "" else await tokenized(intake, call.scope, _prompt(body))
        limit = intake.max_model_len()
        shown = {"count": len(tokens), "max_model_len": limit, "tokens": list(tokens), "token_strs": None}
        tokenizer = intake.model.tokenizer if body.return_token_strs else None
        return Response(await asyncio.to_thread(_written, shown, tokenizer), media_type="application/json")

    @app.post(DETOKENIZE)
    async def detokenize(body: DetokenizeRequest, call: Request) -> Response:
        """The text of tokens."""
        intake = models.of(body.model)
        async with visiting(intake, call.scope) as visit:
            limit, num_tokens = intake.max_model_len(), len(body.tokens)
            if num_tokens > limit:
                raise invalid("tokens", too_long(f"{num_tokens} are too many", limit))
            check_ids(body.tokens, "tokens", intake.model.vocab_size)
            visit.spend(num_tokens)
            text = await asyncio.to_thread(intake.model.tokenizer.decode, body.tokens)
            return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str = "") -> dict[str, Any]:
        """Special tokens and the chat template of a model, by default of the first."""
        shown = models.shown(model).model
        template = None if shown.chat is None else shown.chat.source
        return {**shown.special_tokens, "chat_template": template, "vocab_size": shown.vocab_size}


def _prompt(body: TokenizeRequest) -> inference.GenerateRequest:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages is needed")
    if body.prompt is None:
        return inference.GenerateRequest(chat=chat_of(body))
    return inference.GenerateRequest(text=body.prompt, add_special_tokens=body.add_special_tokens)


def _written(shown: dict[str, Any], tokenizer: Tokenizer | None) -> bytes:
    """Return the response's JSON; with a tokenizer, it has the text of each token."""
    if tokenizer is not None:
        shown["token_strs"] = [tokenizer.piece(token_id).decode(errors="replace") for token_id in shown["tokens"]]
    return msgspec.json.encode(shown)
