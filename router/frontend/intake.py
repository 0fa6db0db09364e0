"""The one way of a request from any endpoint to the core: its client, its terms, its tokens, and whether they fit."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

from pdserve.errors import RequestError, echo, invalid
from pdserve.ids import new_request_id
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.commands import Refused
from pdserve.router.config import RouterConfig
from pdserve.router.events import RequestArrived
from pdserve.router.frontend.answer import Answer, Outcome, Pace, Sink
from pdserve.router.frontend.backend import Backend
from pdserve.router.frontend.clients import Clients, DeniedError, OverLimitError, RefusedError, Visit
from pdserve.router.frontend.prompts import Prompts, Terms, check_terms, fitted
from pdserve.router.frontend.records import Opened, Records
from pdserve.router.frontend.served import ServedModel, check_model
from pdserve.text.stop import OutputText

NOT_SERVED = (DeniedError, RefusedError, RequestError)  # what `Intake.open` raises, and ends of answers


class Intake:
    """Checks and tokenizes requests, hands them to the core, and counts how they end."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        prompts: Prompts,
        clients: Clients,
        config: RouterConfig,
        records: Records,
    ) -> None:
        self.backend = backend
        self.model = model
        self.prompts = prompts
        self.clients = clients
        self._config = config
        self._records = records
        self._pace = Pace(config.stream_interval, asyncio.get_running_loop(), backend.fail)

    async def open(
        self,
        request: inference.GenerateRequest,
        sink: Sink,
        key: bytes | None,
        remaining_s: float = inf,
        received_s: float | None = None,
    ) -> Answer:
        """Admit a request; `sink` receives its answer, at the earliest when the event loop runs next.

        `key` is the caller's API key, `remaining_s` the time until the call's own deadline, `received_s` the time at
        which the request had been read, by default now. The endpoint calls `leave` when it is done with the answer.
        Raises DeniedError, OverLimitError or RequestError; then the endpoint must not call `leave`.
        """
        clock = self.backend.clock
        opened = self._records.open(request, clock.now_s() if received_s is None else received_s)
        try:
            visit = await self.clients.visit(key)
        except OverLimitError as error:
            self._records.reject(opened, error.refused, error.tenant, clock.now_s())
            raise
        try:
            event, terms = await self._arrival(request, visit, opened, remaining_s)
        except BaseException as error:
            visit.end()
            if isinstance(error, RequestError):
                self.backend.outcomes.reject(error.status)
                refused = Refused(error.status, error.message)
                self._records.reject(opened, refused, visit.tenant, clock.now_s())
            raise
        answer = self._answer(event, terms, sink, partial(self._note_end, visit, opened))
        self.backend.admit(event, answer)
        return answer

    def leave(self, answer: Answer) -> None:
        """End an endpoint's use of an answer. If the request has not ended, it is cancelled."""
        answer.leave()
        if answer.outcome is None:
            self.backend.leave(answer.event.request_id)

    async def _arrival(
        self, request: inference.GenerateRequest, visit: Visit, opened: Opened, remaining_s: float
    ) -> tuple[RequestArrived, Terms]:
        check_model(request.model, self.model)
        model, seed = self.model, secrets.randbits(64)
        terms = check_terms(request, model.vocab_size, seed, self._config.max_deadline_ms, model.defaults)
        terms = _permitted(terms, visit)
        deadline_s, clock = opened.received_s + min(terms.deadline_s, remaining_s), self.backend.clock
        terms = await self.prompts.with_bad_words(request, terms, deadline_s - clock.now_s())
        await self.prompts.check_structured(terms, deadline_s - clock.now_s())
        max_model_len = self.max_model_len()
        token_ids = await self.prompts.token_ids(request, max_model_len, deadline_s - clock.now_s())
        visit.spend(len(token_ids))
        event = RequestArrived(
            request_id=new_request_id(),
            token_ids=token_ids,
            params=fitted(len(token_ids), terms, max_model_len),
            received_s=opened.received_s,
            deadline_s=deadline_s,
            priority=terms.priority,
            tenant=terms.tenant,
            ttft_slo_s=terms.ttft_slo_s,
            tpot_slo_s=terms.tpot_slo_s,
            trace=opened.trace,
        )
        return event, terms

    def _answer(
        self, event: RequestArrived, terms: Terms, sink: Sink, on_end: Callable[[Answer, Outcome], None]
    ) -> Answer:
        outputs = [
            OutputText(
                self.model.tokenizer.detokenizer(at_start=False, skip_special=terms.skips_special),
                terms.stops,
                terms.params.min_tokens,
                includes_stop=terms.includes_stop,
            )
            for _ in range(terms.params.n)
        ]
        return Answer(
            event,
            sink,
            outputs=outputs,
            max_unsent_bytes=self._config.max_unsent_bytes,
            pace=self._pace,
            on_end=on_end,
        )

    def _note_end(self, visit: Visit, opened: Opened, answer: Answer, outcome: Outcome) -> None:
        visit.spend(answer.num_tokens)
        visit.end()
        self._records.end(answer, opened, outcome, self.backend.clock.now_s())
        self.backend.outcomes.end(answer.event, outcome, answer.finish_reasons)

    def max_model_len(self) -> int:
        """Return how many tokens a prompt and its answer may have together."""
        of_workers = self.backend.standing().max_model_len
        known = (self.model.max_model_len, self._config.max_model_len, of_workers)
        return min(length for length in known if length is not None)


def _permitted(terms: Terms, visit: Visit) -> Terms:
    """Return a request's terms within its client's limits; RequestError where it names another tenant."""
    client = visit.client
    if client is None:
        return terms
    if terms.tenant not in ("", client.tenant):
        raise invalid("tenant", f"{echo(terms.tenant, repr)} is not the tenant of this API key, {client.tenant!r} is")
    return replace(terms, tenant=client.tenant, priority=min(terms.priority, client.limits.max_priority))
