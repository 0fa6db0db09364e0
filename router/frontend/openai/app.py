"""The routes of the HTTP door. Generation is dispatched by hand; what is asked rarely goes through FastAPI."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import pdserve
from pdserve.errors import RequestError
from pdserve.ids import new_request_id
from pdserve.router.frontend.backend import Backend
from pdserve.router.frontend.clients import DeniedError, OverLimitError
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai.errors import HttpError, error_of
from pdserve.router.frontend.openai.fields import with_generation
from pdserve.router.frontend.openai.generation import (
    REQUEST_ID,
    Generator,
    check_head,
    headers_of,
    key_of,
    read_body,
)
from pdserve.router.frontend.openai.reply import JSON, respond
from pdserve.router.frontend.openai.tokens import add_tokens, check_body
from pdserve.router.frontend.openai.translate import LABEL
from pdserve.router.frontend.page.app import Page
from pdserve.router.frontend.prompts import check_model, usable_label

OPEN = frozenset({"/health", "/ready", "/ping"})  # paths that need no key
_ALLOWED = ((b"allow", b"POST"),)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Serve = Callable[[Scope, bytes, Send], Awaitable[None]]


class App:
    """The ASGI application."""

    def __init__(self, intake: Intake) -> None:
        generator = Generator(intake)
        self._generation: dict[str, Serve] = {
            "/v1/chat/completions": generator.chat,
            "/v1/completions": generator.complete,
        }
        self._intake = intake
        self._page = Page(intake.backend, intake.clients)
        self.routes = routes(intake)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            if (refused := scope["state"].get("refused")) is not None:
                raise refused
            if self._page.serves(scope["path"]):
                await self._page.app(dict(scope), receive, send)
                return
            if scope["path"] not in OPEN:
                self._intake.clients.identify(key_of(scope))
            check_head(scope)
            if scope["method"] != "POST":
                if scope["path"] in self._generation:
                    raise HttpError(405, f"{scope['method']} {scope['path']}: POST is needed", headers=_ALLOWED)
                await self.routes(dict(scope), receive, send)
                return
            body, serve = await read_body(receive), self._generation.get(scope["path"])
            if serve is None:
                check_body(scope["path"], body)
                await self.routes(dict(scope), _again(body), send)
            else:
                await serve(scope, body, send)
        except (HttpError, DeniedError, OverLimitError, RequestError, ValueError) as error:
            await _end(error_of(error), scope, send)
        finally:
            for name in ("connection", "cycle"):  # they refer to this scope: the garbage collector is left no cycle
                scope["state"].pop(name, None)


def _again(body: bytes) -> Receive:
    """Return a `receive` that gives a body which has been read."""

    async def receive() -> Any:  # noqa: ANN401 - ASGI's
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def _end(error: HttpError, scope: Scope, send: Send) -> None:
    headers = [*JSON, *error.headers]
    if not any(name == REQUEST_ID for name, _ in headers):
        label = usable_label(headers_of(scope).get(LABEL, "")) or new_request_id().hex()
        headers.append((REQUEST_ID, label.encode()))
    await respond(send, error.status, error.body(), headers)


def routes(intake: Intake) -> FastAPI:
    """Return what is served besides generation, with a description of everything at /openapi.json."""
    app = FastAPI(title="pdserve", version=pdserve.__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _not_served)
    for kind in (RequestValidationError, HttpError, DeniedError, OverLimitError, RequestError, ValueError):
        app.add_exception_handler(kind, _refused)
    _add_state(app, intake.backend)
    _add_models(app, intake)
    add_tokens(app, intake)
    app.openapi = partial(with_generation, app)  # type: ignore[method-assign]
    return app


async def _refused(_request: Request, error: Exception) -> Response:
    return _response(error_of(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    headers = tuple((name.encode(), value.encode()) for name, value in (error.headers or {}).items())
    code = "not_found" if error.status_code == 404 else None
    return _response(HttpError(error.status_code, text, code=code, headers=headers))


def _response(error: HttpError) -> Response:
    headers = {name.decode(): value.decode() for name, value in (*JSON, *error.headers)}
    return Response(error.body(), error.status, headers)


def _add_state(app: FastAPI, backend: Backend) -> None:
    @app.get("/health")
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Whether this router lives."""
        return Response(status_code=200 if backend.standing().is_live else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests may come: some pair of workers serves, or did lately."""
        return Response(status_code=200 if backend.standing().is_ready else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of pdserve."""
        return {"version": pdserve.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        text = await backend.metrics()
        if not text:
            raise HTTPException(404, "metrics are turned off")
        return Response(text, media_type=METRICS_TYPE)


def _add_models(app: FastAPI, intake: Intake) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "root": intake.model.name,
            "parent": None,
            "max_model_len": intake.max_model_len(),
            "permission": [],
        }

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)
    async def models() -> dict[str, Any]:
        """The names of the one model that is served."""
        return {"object": "list", "data": [card(name) for name in intake.model.names]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """A model."""
        check_model(model, intake.model)
        return card(model)
