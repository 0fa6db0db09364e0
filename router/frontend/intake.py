"""The one way of a request from any endpoint to the core: its client, its terms, its tokens, and whether they fit."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from pdserve.base.errors import echo
from pdserve.base.values import value
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.answer import Answer, Outcome, Pace, Sink
from pdserve.router.frontend.backend import Backend
from pdserve.router.frontend.clients import Clients, Visit
from pdserve.router.frontend.next_turns import NextTurns, Said
from pdserve.router.frontend.prompts import Loosen, Prompts, with_tokens
from pdserve.router.frontend.records import Opened, Records
from pdserve.router.frontend.served import ServedModel
from pdserve.router.frontend.terms import check_terms
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.events import RequestArrived
from pdserve.text.chat import ChatTemplate
from pdserve.text.stop import OutputText


@value
class Preparing:
    """What an endpoint does in its own way to a request before the core knows it."""

    loosen: Loosen | None = None  # replaces a structured output that is refused
    template: ChatTemplate | None = None  # of a conversation, in place of the model's
    said: Said | None = None  # what a client will send back of an answer, to a chat


_PLAINLY = Preparing()


class Intake:
    """Checks and tokenizes requests, hands them to the core, and counts how they end."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        prompts: Prompts,
        clients: Clients,
        config: EndpointConfig,
        records: Records,
    ) -> None:
        self.backend = backend
        self.model = model
        self.prompts = prompts
        self.clients = clients
        self._config = config
        self._records = records
        self.next_turns: NextTurns | None = None  # while they are prepared
        self._pace = Pace(config.stream_interval, asyncio.get_running_loop(), backend.fail)

    async def accept(
        self,
        request: inference.GenerateRequest,
        sink: Sink,
        caller: bytes | Visit | None,
        remaining_s: float = inf,
        received_s: float | None = None,
        preparing: Preparing = _PLAINLY,
    ) -> Answer:
        """Admit a request; `sink` receives its answer, at the earliest when the event loop runs next.

        `caller` is the caller's API key, or the visit of a call that this request is a part of. `remaining_s` is the
        time until the call's own deadline, `received_s` the time at which the request had been read, by default now.
        The endpoint calls `leave` when it is done with the answer.
        Raises RefusedError; then the endpoint must not call `leave`.
        """
        clock = self.backend.clock
        opened = self._records.begin(request, clock.now_s() if received_s is None else received_s)
        client = caller.client if isinstance(caller, Visit) else self.clients.identify(caller)
        try:
            visit = caller.part() if isinstance(caller, Visit) else await self.clients.visit(client)
            try:
                event, ignored = await self._arrival(request, visit, opened, remaining_s, preparing)
            except BaseException as error:
                visit.end()
                if isinstance(error, RefusedError):
                    self.backend.outcomes.reject(error.refused.status)
                raise
        except RefusedError as error:
            self._records.reject(opened, error.refused, "" if client is None else client.tenant, clock.now_s())
            raise
        then = None
        if self.next_turns is not None:
            self.next_turns.give_way(event)
            if _prepares(request):
                then = partial(self.next_turns.begin, request, preparing.said, visit.part())
        answer = self._answer(event, request, sink, partial(self._note_end, visit, opened, then))
        answer.keeps = then is not None
        answer.ignored = ignored
        self.backend.submit(event, answer)
        return answer

    def leave(self, answer: Answer) -> None:
        """End an endpoint's use of an answer. If the request has not ended, it is cancelled."""
        answer.leave()
        if answer.outcome is None:
            self.backend.leave(answer.event.request_id)

    async def _arrival(
        self,
        request: inference.GenerateRequest,
        visit: Visit,
        opened: Opened,
        remaining_s: float,
        preparing: Preparing,
    ) -> tuple[RequestArrived, tuple[str, ...]]:
        """Return a request for the core, and what of its schemas is ignored."""
        limit_ms, clock, prompts = self._config.max_deadline_ms, self.backend.clock, self.prompts
        adapter = self.adapter(request.model)
        event = _permitted(check_terms(request, self.model, limit_ms, opened.received_s, remaining_s), visit)
        event = await prompts.with_bad_words(event, request, event.deadline_s - clock.now_s())
        event, ignored = await prompts.with_structured(event, event.deadline_s - clock.now_s(), preparing.loosen)
        max_model_len, template = self._room(event), preparing.template
        token_ids = await prompts.tokenize(request, max_model_len, event.deadline_s - clock.now_s(), template)
        visit.spend(len(token_ids))
        event = with_tokens(event, request, token_ids, max_model_len)
        return replace(event, trace=opened.trace, adapter=adapter), ignored

    def _answer(
        self,
        event: RequestArrived,
        request: inference.GenerateRequest,
        sink: Sink,
        on_end: Callable[[Answer, Outcome], None],
    ) -> Answer:
        sampling, stops = request.sampling, tuple(request.stop)
        skips_special = not sampling.HasField("skip_special_tokens") or sampling.skip_special_tokens
        outputs = [
            OutputText(
                self.model.tokenizer.detokenizer(at_start=False, skip_special=skips_special),
                stops,
                event.params.min_tokens,
                includes_stop=sampling.include_stop_str_in_output,
            )
            for _ in range(event.params.n)
        ]
        return Answer(
            event,
            sink,
            outputs=outputs,
            max_unsent_bytes=self._config.max_unsent_bytes,
            pace=self._pace,
            on_end=on_end,
        )

    def _note_end(
        self, visit: Visit, opened: Opened, then: Callable[[Answer], None] | None, answer: Answer, outcome: Outcome
    ) -> None:
        visit.spend(answer.num_tokens)
        visit.end()
        self._records.end(answer, opened, outcome, self.backend.clock.now_s())
        self.backend.outcomes.end(answer.event, outcome, answer.finish_reasons)
        if then is not None and isinstance(outcome, Finished):
            then(answer)

    def adapter(self, name: str) -> AdapterDigest:
        """Return which adapter a name asks for; RefusedError unless it is the model's, a loaded adapter's, or empty."""
        if not name or name in self.model.names:
            return NO_ADAPTER
        adapter = self.backend.readiness().adapters.get(name)
        if adapter is None:
            raise not_served(name, (self.model.name,))
        return adapter

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may name now: the model, and each adapter that workers have loaded."""
        return tuple(dict.fromkeys((*self.model.names, *self.backend.readiness().adapters)))

    def _room(self, event: RequestArrived) -> int:
        """Return how many tokens a request may have; of a text for a vector, its model's files may say."""
        pooling, limit = event.params.pooling, self.model.embedding.max_tokens
        length = self.max_model_len()
        return length if pooling is None or pooling.kind == "logits" or limit is None else min(length, limit + 1)

    def max_model_len(self) -> int:
        """Return how many tokens a prompt and its answer may have together."""
        of_workers = self.backend.readiness().max_model_len
        known = (self.model.max_model_len, self._config.max_model_len, of_workers)
        return min(length for length in known if length is not None)


def not_served(name: str, served: Sequence[str]) -> RefusedError:
    """Return the error for a name that none of the models has that are served."""
    listed = " and ".join(echo(each, repr) for each in served)
    text = f"model: {echo(name, repr)} is not served here; {listed} {'are' if len(served) > 1 else 'is'}"
    return RefusedError(Refused(Cause.MODEL, text))


def _prepares(request: inference.GenerateRequest) -> bool:
    """Whether the next turn is to be prepared: of several continuations nobody knows which goes on."""
    return request.prepare_next and request.sampling.n <= 1


def _permitted(event: RequestArrived, visit: Visit) -> RequestArrived:
    """Return a request within its client's limits; RefusedError if it names another tenant."""
    client = visit.client
    if client is None:
        return event
    if event.tenant not in ("", client.tenant):
        raise invalid("tenant", f"{echo(event.tenant, repr)} is not the tenant of this API key, {client.tenant!r} is")
    return replace(event, tenant=client.tenant, priority=min(event.priority, client.limits.max_priority))
