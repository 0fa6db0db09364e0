"""The description of the HTTP endpoint at /openapi.json."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from pdserve.router.frontend.anthropic.fields import CountTokensRequest, MessagesRequest
from pdserve.router.frontend.openai.body import Body
from pdserve.router.frontend.openai.fields import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pdserve.router.frontend.responses.fields import CountInputRequest, ResponseRequest

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, COUNT_INPUT = "/v1/responses", "/v1/responses/input_tokens"
EMBEDDINGS, POOLING, RERANK, SCORE = "/v1/embeddings", "/pooling", "/v1/rerank", "/v1/score"
UNSTREAMED = frozenset({COUNT_TOKENS, COUNT_INPUT, EMBEDDINGS, POOLING, RERANK, SCORE})
GENERATION: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: CountTokensRequest,
    RESPONSES: ResponseRequest,
    COUNT_INPUT: CountInputRequest,
    EMBEDDINGS: EmbeddingsRequest,
    POOLING: PoolingRequest,
    RERANK: RerankRequest,
    SCORE: ScoreRequest,
}
REF = "#/components/schemas/{model}"
ERRORS = {
    "400": "The request is not valid; `param` names the field.",
    "401": "No API key is shown, or a wrong one.",
    "404": "The model is not served here, or what the path names is not kept.",
    "408": "The request did not come in time.",
    "413": "The body is over the limit.",
    "429": "There is no room, or the objectives cannot be kept; Retry-After says when to try again.",
    "503": "No workers are there, or the router shuts down.",
    "504": "The deadline has passed.",
}


def with_generation(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(model, "validation") for model in GENERATION.values()], ref_template=REF)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components |= schemas["$defs"]
    errors = {status: _answer(text) for status, text in ERRORS.items()}
    generated = _answer("The answer, whole or in events.")
    generated["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    whole = _answer("The answer.")
    for path, model in GENERATION.items():
        body = {"schema": {"$ref": REF.format(model=model.__name__)}}
        document["paths"].setdefault(path, {})["post"] = {
            "summary": model.__doc__,
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": {"200": whole if path in UNSTREAMED else generated, **errors},
        }
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"] = {**errors, **operation["responses"]}
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    app.openapi_schema = document
    return document


def _answer(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
