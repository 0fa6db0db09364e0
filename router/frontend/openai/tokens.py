"""Text to tokens and back, without an answer. Both count against a tenant's limits, as requests for text do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from pdserve.errors import invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.clients import Visit
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai.errors import HttpError
from pdserve.router.frontend.openai.fields import DetokenizeRequest, TokenizeRequest
from pdserve.router.frontend.openai.generation import key_of
from pdserve.router.frontend.openai.translate import chat_of
from pdserve.router.frontend.prompts import check_model
from pdserve.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 1 << 20
PATHS = TOKENIZE, DETOKENIZE = ("/tokenize", "/detokenize")


def check_body(path: str, body: bytes) -> None:
    """Raise HttpError where a body is larger than one of these routes takes."""
    if path in PATHS and len(body) > MAX_BODY_BYTES:
        raise HttpError(413, f"body: {len(body)} bytes are over the limit of {MAX_BODY_BYTES} of {path}")


def add_tokens(app: FastAPI, intake: Intake) -> None:
    """Add the routes."""
    model = intake.model

    @app.post(TOKENIZE)
    async def tokenize(body: TokenizeRequest, call: Request) -> Response:
        """The tokens of a text, or of a conversation as the model's template writes it."""
        async with _visit(intake, call) as visit:
            limit, request = intake.max_model_len(), _prompt(body)
            check_model(body.model or "", model)
            tokens = [] if body.prompt == "" else await intake.prompts.token_ids(request, limit, inf)
            if visit is not None:
                visit.spend(len(tokens))
            shown = {"count": len(tokens), "max_model_len": limit, "tokens": list(tokens), "token_strs": None}
            tokenizer = model.tokenizer if body.return_token_strs else None
            return Response(await asyncio.to_thread(_written, shown, tokenizer), media_type="application/json")

    @app.post(DETOKENIZE)
    async def detokenize(body: DetokenizeRequest, call: Request) -> Response:
        """The text of tokens."""
        async with _visit(intake, call) as visit:
            check_model(body.model or "", model)
            limit, num_tokens = intake.max_model_len(), len(body.tokens)
            if num_tokens > limit:
                raise invalid("tokens", f"{num_tokens} are over the limit of {limit} (max_model_len)")
            if visit is not None:
                visit.spend(num_tokens)
            text = await asyncio.to_thread(model.tokenizer.decode, body.tokens)
            return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Special tokens and the chat template."""
        template = None if model.chat is None else model.chat.source
        return {**model.special_tokens, "chat_template": template, "vocab_size": model.vocab_size}


@asynccontextmanager
async def _visit(intake: Intake, call: Request) -> AsyncIterator[Visit | None]:
    """Take a call in as a request of its tenant; DeniedError or OverLimitError where that cannot be."""
    visit = await intake.clients.visit(key_of(call.scope))
    try:
        yield visit
    finally:
        if visit is not None:
            visit.end()


def _prompt(body: TokenizeRequest) -> inference.GenerateRequest:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages is needed")
    if body.prompt is None:
        return inference.GenerateRequest(chat=chat_of(body))
    return inference.GenerateRequest(text=body.prompt, add_special_tokens=body.add_special_tokens)


def _written(shown: dict[str, Any], tokenizer: Tokenizer | None) -> bytes:
    """Return a response; with a tokenizer, the text of each token is in it."""
    if tokenizer is not None:
        shown["token_strs"] = [tokenizer.piece(token_id).decode(errors="replace") for token_id in shown["tokens"]]
    return msgspec.json.encode(shown)
