"""Records each request at its end, as spans and as a line in the log. Nothing is done for each token."""

import logging
import secrets
from collections.abc import Sequence
from random import random
from typing import TYPE_CHECKING

from pdserve.base.values import value
from pdserve.observe.trace_context import (
    SAMPLED,
    Attributes,
    AttributeValue,
    Span,
    TraceContext,
    new_span_id,
    read_trace,
)
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Refused
from pdserve.protocol.reports import FINISH_REASONS, Stage
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.answer import Answer, Outcome
from pdserve.router.frontend.terms import MAX_LABEL_BYTES
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.timeline import parts

if TYPE_CHECKING:
    from pdserve.observe.tracing import SpanExport

logger = logging.getLogger(__name__)

PROVIDER = "pdserve"
_LATENCIES = (  # vLLM's names, seconds
    ("gen_ai.latency.time_in_queue", Stage.RECEIVED, Stage.PREFILL_STARTED),
    ("gen_ai.latency.time_to_first_token", Stage.RECEIVED, Stage.FIRST_TOKEN),
    ("gen_ai.latency.time_in_model_prefill", Stage.PREFILL_STARTED, Stage.PREFILL_DONE),
    ("gen_ai.latency.time_in_model_decode", Stage.FIRST_TOKEN, Stage.FINISHED),
    ("gen_ai.latency.e2e", Stage.RECEIVED, Stage.FINISHED),
)


@value
class Opened:
    """A request as it came from an endpoint."""

    received_s: float
    operation: str  # its name in OpenTelemetry's conventions for generative AI
    label: str  # the client's name for it
    trace: TraceContext | None  # of the router's span, the parent of workers' spans; without a span, the client's
    parent_id: str  # the client's span; empty: none


class Records:
    """Follows requests from their arrival to their end."""

    def __init__(self, model: str, config: EndpointConfig, export: "SpanExport | None" = None) -> None:
        self._model = model
        self._export = export
        self._sample_ratio = config.otlp_traces_sample_ratio
        self._level = logging.INFO if config.enable_log_requests else logging.DEBUG

    def begin(self, request: inference.GenerateRequest, received_s: float) -> Opened:
        """Begin the record of a request, and its span if the request is traced."""
        operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        operation = "embeddings" if request.sampling.HasField("pooling") else operation
        trace = given = read_trace(request.traceparent, request.tracestate) if request.traceparent else None
        if self._export is not None and (given.is_sampled if given else random() < self._sample_ratio):
            trace_id, flags = (given.trace_id, given.flags) if given else (secrets.token_hex(16), SAMPLED)
            trace = TraceContext(trace_id, new_span_id(), flags, given.tracestate if given else "")
        label = request.request_label[:MAX_LABEL_BYTES]  # too long a label is refused later
        return Opened(received_s, operation, label, trace, given.span_id if given else "")

    def reject(self, opened: Opened, refused: Refused, tenant: str, now_s: float) -> None:
        """Record a request that was not admitted: it was not valid, or its tenant has used its limits."""
        if logger.isEnabledFor(self._level):
            fields = _asked(opened, tenant) | _logged(refused)
            logger.log(self._level, "a request was not admitted: %s", refused, extra=fields)
        if self._is_traced(opened):
            self._send(opened, now_s, _failed(refused), refused.message)

    def end(self, answer: Answer, opened: Opened, outcome: Outcome, now_s: float) -> None:
        """Record a request at its end."""
        if logger.isEnabledFor(self._level):
            _log(self._level, answer, opened, outcome)
        if not self._is_traced(opened):
            return
        if isinstance(outcome, Finished):
            end_s = opened.received_s + outcome.ledger.steps[-1][1] / 1e3
            self._send(opened, end_s, {**_terms(answer), **_finished(outcome, answer)}, "", outcome.ledger.steps)
        else:
            self._send(opened, now_s, {**_terms(answer), **_failed(outcome)}, outcome.message)

    def _is_traced(self, opened: Opened) -> bool:
        return self._export is not None and opened.trace is not None and opened.trace.is_sampled

    def _send(
        self,
        opened: Opened,
        end_s: float,
        attributes: Attributes,
        error: str,
        steps: Sequence[tuple[Stage, float]] = (),
    ) -> None:
        """Send the router's span of a request, and a child span for each part of the request's timeline."""
        trace, received_s = opened.trace, opened.received_s
        assert self._export is not None
        assert trace is not None
        asked: dict[str, AttributeValue] = {
            "gen_ai.operation.name": opened.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
        }
        if opened.label:
            asked["gen_ai.request.id"] = opened.label
        name = f"{opened.operation} {self._model}"
        given = {**asked, **attributes}
        root = Span(name, received_s, end_s, given, opened.parent_id, trace.span_id, error, answers_client=True)
        children = [
            Span(part, received_s + start_ms / 1e3, received_s + end_ms / 1e3, {}, trace.span_id)
            for part, start_ms, end_ms in parts(steps)
        ]
        self._export.send(trace, (root, *children))


def _terms(answer: Answer) -> dict[str, AttributeValue]:
    event, params = answer.event, answer.event.params
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": answer.hex_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": params.n,
        "pdserve.request.id": answer.hex_id,
        "pdserve.request.priority": event.priority,
    }
    slos = (("ttft", event.ttft_slo_s), ("tpot", event.tpot_slo_s))
    attributes |= {f"pdserve.slo.{name}": slo_s for name, slo_s in slos if slo_s is not None}
    if event.tenant:
        attributes["pdserve.tenant"] = event.tenant
    return attributes


def _finished(outcome: Finished, answer: Answer) -> dict[str, AttributeValue]:
    usage, ledger = outcome.usage, outcome.ledger
    reached_ms = dict(ledger.steps)
    latencies = {
        name: (reached_ms[end] - reached_ms[start]) / 1e3
        for name, start, end in _LATENCIES
        if start in reached_ms and end in reached_ms
    }
    return {
        "gen_ai.response.finish_reasons": [FINISH_REASONS[reason] for reason in answer.finish_reasons],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        **latencies,
        "pdserve.tpot": ledger.tpot_ms / 1e3,
        "pdserve.prefill_worker": ledger.prefill_worker,
        "pdserve.decode_worker": ledger.decode_worker,
        "pdserve.attempts": ledger.attempts,
        "pdserve.moves": len(ledger.moves),
        "pdserve.decision": ledger.decision,
        "pdserve.handoff.bytes": ledger.handoff_bytes,
    }


def _failed(refused: Refused) -> dict[str, AttributeValue]:
    return {"error.type": refused.status.value, "pdserve.refused_because": refused.cause.value}


def _asked(opened: Opened, tenant: str) -> dict[str, object]:
    """Return the fields of a log record that describe the request itself."""
    fields = {"trace_id": opened.trace and opened.trace.trace_id, "label": opened.label, "tenant": tenant}
    return {name: given for name, given in fields.items() if given}


def _logged(refused: Refused) -> dict[str, object]:
    return {"status": refused.status.value, "cause": refused.cause.value}


def _log(level: int, answer: Answer, opened: Opened, outcome: Outcome) -> None:
    fields = {"request_id": answer.hex_id, **_asked(opened, answer.event.tenant)}
    if isinstance(outcome, Finished):
        usage, ledger = outcome.usage, outcome.ledger
        fields |= {
            "status": "OK",
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "ttft_ms": round(ledger.ttft_ms, 3),
            "tpot_ms": round(ledger.tpot_ms, 3),
            "prefill_worker": ledger.prefill_worker,
            "decode_worker": ledger.decode_worker,
        }
        text = (
            f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, TTFT {ledger.ttft_ms:.1f} ms, "
            f"TPOT {ledger.tpot_ms:.1f} ms, {ledger.prefill_worker or '-'} to {ledger.decode_worker or '-'}"
        )
    else:
        fields |= _logged(outcome)
        text = str(outcome)
    logger.log(level, "request %s: %s", answer.hex_id, text, extra=fields)
