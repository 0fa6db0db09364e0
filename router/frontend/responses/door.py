"""The Responses API's routes that generate."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from starlette.types import Scope, Send

from pdserve.base.ids import new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import RefusedError
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.models import Models
from pdserve.router.frontend.openai.connection import Connection
from pdserve.router.frontend.openai.errors import JSON, Header
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.openai.filters import Plan
from pdserve.router.frontend.openai.generation import (
    REQUEST_ID,
    Generator,
    choices_of,
    headers_of,
    ignored,
    key_of,
    preparing_of,
    tokenized,
)
from pdserve.router.frontend.openai.reply import ROUTERS_ID, respond
from pdserve.router.frontend.openai.translate import chat_of, label_of
from pdserve.router.frontend.responses.background import Background, Job
from pdserve.router.frontend.responses.event_log import EVENTS, EventLog
from pdserve.router.frontend.responses.events import Json
from pdserve.router.frontend.responses.fields import CountInputRequest, ResponseRequest
from pdserve.router.frontend.responses.keeping import Keeping, context_of, given_in, session_of, with_model
from pdserve.router.frontend.responses.response import ItemsResponse, new_response_id
from pdserve.router.frontend.responses.shelf import Limits
from pdserve.router.frontend.responses.store import Store
from pdserve.router.frontend.responses.tools import placed
from pdserve.text.reasoning import ReasoningTokens

_Asked = TypeVar("_Asked", bound=CountInputRequest)


@asynccontextmanager
async def open_responses(config: EndpointConfig, models: Models, owner: str) -> AsyncIterator["Responses"]:
    """Keep responses for the length of the block. `owner`: this process's name. ConfigError for an unusable file."""
    limits = Limits(config.max_num_stored, config.max_stored_bytes, config.responses_ttl_s)
    store = Store(config.responses_file, limits, owner, models.first.backend.kept)
    try:
        async with Background(models, config.max_num_background, config.max_deadline_ms / 1e3) as background:
            yield Responses(models, store, background)
    finally:
        await store.close()


class Responses:
    """Serves POST /v1/responses and /v1/responses/input_tokens."""

    def __init__(self, models: Models, store: Store, background: Background) -> None:
        self.store = store
        self.background = background
        self._models = models

    async def create(self, scope: Scope, body: bytes, send: Send) -> None:
        """Serve POST /v1/responses. Raises what `errors.refused_by` knows."""
        asked = ResponseRequest.model_validate_json(body)
        asked.check()
        tenant = self._models.first.clients.tenant(key_of(scope))
        asked, intake = await self._directed(tenant, asked)
        context = await context_of(self.store, tenant, asked)
        given = await given_in(self.store, tenant, asked.input)
        name = new_response_id()
        session = asked.prompt_cache_key or await session_of(self.store, tenant, asked, name)
        chat = asked.chat(context, given).model_copy(update={"prompt_cache_key": session})

        def kept(plan: Plan) -> Keeping:
            return Keeping(self.store, tenant, asked, given, _begun(intake, asked, plan, name))

        def begun(plan: Plan) -> ItemsResponse:
            keeping = kept(plan)
            if asked.is_stored:
                keeping.response.settle = keeping.settle
            return keeping.response

        try:
            if asked.background:
                await self._begin(intake, asked, chat, kept, scope, send)
            else:
                await Generator(intake).converse(chat, asked, begun, scope, send)
        except RefusedError as error:
            raise RefusedError(placed(error.refused, asked.tools)) from None

    async def _directed(self, tenant: str, asked: _Asked) -> tuple[_Asked, Intake]:
        """Return a request that names its model where there are several, and that model's intake."""
        if len(self._models) > 1:
            asked = await with_model(self.store, tenant, asked)
        return asked, self._models.of(asked.model)

    async def _begin(
        self,
        intake: Intake,
        asked: ResponseRequest,
        chat: ChatRequest,
        kept: Callable[[Plan], Keeping],
        scope: Scope,
        send: Send,
    ) -> None:
        """Begin a response in the background, and tell the client of it."""
        given_headers = headers_of(scope)
        request, plan = Generator(intake).planned(chat, given_headers)
        keeping = kept(plan)
        job = Job(intake, keeping, choices_of(plan)[0], EventLog() if asked.stream else None)
        try:
            answer, told = await self.background.start(
                job, request, key_of(scope), scope["state"]["received_s"], preparing_of(plan)
            )
        except RefusedError as error:
            raise RefusedError(plan.renamed(error.refused)) from None
        label = label_of(chat, given_headers) or new_request_id().hex()
        headers = [(REQUEST_ID, label.encode()), (ROUTERS_ID, answer.hex_id.encode()), *ignored(asked, plan, [answer])]
        if job.log is None:
            await respond(send, 200, msgspec.json.encode(told), [*JSON, *headers])
        else:
            await _stream(job.log, scope["state"]["connection"], send, [*EVENTS, *headers])

    async def count(self, scope: Scope, body: bytes, send: Send) -> None:
        """Serve POST /v1/responses/input_tokens. Raises what `errors.refused_by` knows."""
        asked = CountInputRequest.model_validate_json(body)
        asked.check()
        tenant = self._models.first.clients.tenant(key_of(scope))
        asked, intake = await self._directed(tenant, asked)
        context = await context_of(self.store, tenant, asked)
        chat = asked.chat(context, await given_in(self.store, tenant, asked.input))
        token_ids = await tokenized(intake, scope, inference.GenerateRequest(chat=chat_of(chat)))
        told = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        await respond(send, 200, msgspec.json.encode(told), JSON)


def _begun(intake: Intake, asked: ResponseRequest, plan: Plan, name: str) -> ItemsResponse:
    tokenizer, reasoning = intake.model.tokenizer, None
    if plan.begins_inside is not None:
        reasoning = ReasoningTokens[Json](tokenizer.piece, begins_inside=plan.begins_inside)
    return ItemsResponse(asked, intake.model.name_for(asked.model), tokenizer, reasoning, name)


async def _stream(log: EventLog, connection: Connection, send: Send, headers: Sequence[Header]) -> None:
    """Write events until the last one, or until the client has left. The answer goes on without it."""
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for data in log.read(0):
        if connection.transport.is_closing():
            return
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
