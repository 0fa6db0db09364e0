"""A request's spans and its log line, as a collector and an operator get them of a real router."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2
import pytest
from otlp_sink import Received, Sink, collector
from router_fakes import RouterUnderTest, StartRouter, collect, error_of

from pdserve.observe import tracing
from pdserve.observe.logs import JsonFormatter
from pdserve.observe.trace_context import TraceContext, read_trace
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.frontend import records
from pdserve.router.frontend.clients import new_key

CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "vendor=1,other=2")
UNSAMPLED = TraceContext(CLIENT.trace_id, CLIENT.span_id, 0)
UP_TO_FIRST_TOKEN = {"tokenize", "admit", "place", "send", "fetch", "prefill.queue", "prefill", "first_token"}


@pytest.fixture
async def sink(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sink]:
    monkeypatch.setattr(tracing, "DELAY_S", 0.02)
    async with collector() as sink:
        yield sink


async def spans_of(sink: Sink, router: RouterUnderTest, num_roots: int = 1) -> list[Received]:
    """Return all spans once so many requests have theirs; a trace's root is sent first."""
    await sink.until(lambda: sum(span.span.kind == span.span.SPAN_KIND_SERVER for span in sink.spans) >= num_roots)
    await router.until_idle()
    return sink.spans


def root(spans: list[Received]) -> Received:
    (found,) = (span for span in spans if span.span.kind == span.span.SPAN_KIND_SERVER)
    return found


def trace_given(spec: link.SequenceSpec) -> TraceContext:
    given = read_trace(spec.traceparent, spec.tracestate)
    assert given is not None
    return given


async def test_a_request_is_a_span_with_one_below_it_for_each_part(start_router: StartRouter, sink: Sink) -> None:
    router = await start_router(otlp_traces_endpoint=sink.address)
    prefill, decode = await router.pair()
    message = inference.ChatMessage(role="user", content="hi")
    asked = {"chat": inference.Chat(messages=[message]), "request_label": "mine", "tenant": "acme"}
    replies = await collect(router.generate(**asked, max_tokens=6, temperature=0.5))
    last = replies[-1]
    spans = await spans_of(sink, router)
    top = root(spans)
    assert (top.service, top.instance, top.name) == ("pdserve-router", "router", "chat tiny")
    assert top.span.parent_span_id == b""
    assert top.seconds * 1e3 == pytest.approx(last.ledger.steps[-1].at_ms, abs=1e-3)
    children = [span for span in spans if span is not top]
    assert all(span.span.parent_span_id == top.span.span_id for span in children)
    after = {"decode", "handoff.check", "decode.queue"}
    assert {span.name for span in children} == UP_TO_FIRST_TOKEN - {"fetch"} | after
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": last.request_id,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": last.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 6,
        "pdserve.prefill_worker": "p0",
        "pdserve.decode_worker": "d0",
        "pdserve.tenant": "acme",
    }
    assert expected.items() <= top.attributes.items()
    for given in (prefill.prefills[0].spec, decode.decodes[0].spec):
        assert trace_given(given).span_id == top.span.span_id.hex()
        assert trace_given(given).trace_id == top.span.trace_id.hex()


@pytest.mark.parametrize("carrier", ["metadata", "fields", "headers"])
async def test_a_clients_trace_goes_on_in_ours(start_router: StartRouter, sink: Sink, carrier: str) -> None:
    router = await start_router(otlp_traces_endpoint=sink.address, otlp_traces_sample_ratio=0.0, http_port=0)
    prefill, _ = await router.pair()
    given = {"traceparent": CLIENT.traceparent, "tracestate": CLIENT.tracestate}
    several = (("traceparent", CLIENT.traceparent), *(("tracestate", state) for state in CLIENT.tracestate.split(",")))
    if carrier == "headers":
        async with httpx2.AsyncClient(base_url=router.addresses.http) as http:
            (await http.post("/v1/completions", json={"prompt": "a"}, headers=several)).raise_for_status()
    else:
        request = inference.GenerateRequest(text="a", **(given if carrier == "fields" else {}))
        metadata = several if carrier == "metadata" else ()
        await collect(router.inference.Generate(request, metadata=metadata))
    top = root(await spans_of(sink, router))
    assert top.span.trace_id.hex() == CLIENT.trace_id
    assert top.span.parent_span_id.hex() == CLIENT.span_id
    assert top.span.trace_state == CLIENT.tracestate
    passed_on = trace_given(prefill.prefills[0].spec)
    assert passed_on == TraceContext(CLIENT.trace_id, top.span.span_id.hex(), 1, CLIENT.tracestate)


async def test_a_request_that_is_not_traced_here_has_its_clients_trace_passed_on(
    start_router: StartRouter, sink: Sink
) -> None:
    for settings in ({}, {"otlp_traces_endpoint": sink.address}):
        router = await start_router(**settings)
        prefill, _ = await router.pair()
        await collect(router.generate(text="a", max_tokens=2, traceparent=UNSAMPLED.traceparent))
        assert trace_given(prefill.prefills[0].spec) == UNSAMPLED
    unasked = await start_router(otlp_traces_endpoint=sink.address, otlp_traces_sample_ratio=0.0)
    prefill, _ = await unasked.pair()
    await collect(unasked.generate(text="a", max_tokens=2, traceparent="00-nonsense"))
    assert prefill.prefills[0].spec.traceparent == ""
    await collect(unasked.generate(text="a", max_tokens=2, traceparent=CLIENT.traceparent))
    assert root(await spans_of(sink, unasked)).span.parent_span_id.hex() == CLIENT.span_id


async def test_a_request_that_fails_says_why_in_its_span(start_router: StartRouter, sink: Sink) -> None:
    router = await start_router(otlp_traces_endpoint=sink.address, pool_grace_s=0.0)
    await error_of(router.generate(text="a", temperature=-1.0))
    code, text = await error_of(router.generate(text="a"))
    assert code is grpc.StatusCode.UNAVAILABLE
    spans = await spans_of(sink, router, num_roots=2)
    invalid, refused = sorted(spans, key=lambda span: span.span.start_time_unix_nano)
    assert "temperature" in invalid.span.status.message
    assert invalid.attributes["error.type"] == "INVALID_ARGUMENT"
    assert (refused.span.status.message, refused.attributes["error.type"]) == (text, "UNAVAILABLE")


async def test_the_parts_in_ledger_and_spans_add_up_to_the_same(start_router: StartRouter, sink: Sink) -> None:
    router = await start_router(otlp_traces_endpoint=sink.address)
    await router.pair()
    answers = [await collect(router.generate(text=f"prompt {number}", max_tokens=3)) for number in range(20)]
    spans = await spans_of(sink, router, len(answers))
    names = {span.span.span_id: span.attributes["gen_ai.response.id"] for span in spans if span.attributes}
    in_spans = dict.fromkeys(names.values(), 0.0)
    for span in spans:
        if span.name in UP_TO_FIRST_TOKEN:
            in_spans[names[span.span.parent_span_id]] += 1e3 * span.seconds
    assert in_spans == pytest.approx({each[0].request_id: each[-1].ledger.ttft_ms for each in answers}, abs=1e-3)


async def test_nothing_is_made_for_spans_of_a_request_that_is_not_traced(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_terms", None)
    router = await start_router()
    await router.pair()
    await collect(router.generate(text="a", max_tokens=2))


async def test_a_line_is_logged_at_each_end_if_asked_for(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.router.frontend.records")
    for settings in ({}, {"enable_log_requests": True}):
        router = await start_router(**settings)
        await router.pair()
        replies = await collect(
            router.generate(text="a", max_tokens=2, traceparent=CLIENT.traceparent, request_label="mine")
        )
        await router.until_idle()
    (record,) = (record for record in caplog.records if record.name == "pdserve.router.frontend.records")
    written = json.loads(JsonFormatter("router").format(record))
    expected = {"request_id": replies[0].request_id, "trace_id": CLIENT.trace_id, "label": "mine", "status": "OK"}
    assert expected.items() <= written.items()
    assert written["ttft_ms"] == pytest.approx(replies[-1].ledger.ttft_ms, abs=1e-3)


async def test_a_line_is_logged_for_each_request_that_is_not_admitted(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "pdserve.router.frontend.records")
    key, digest = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"tenants: {{acme: {{keys: [{{id: a, sha256: {digest}}}], requests_per_s: 0.001, burst: 1}}}}\n")
    file.chmod(0o600)
    router = await start_router(enable_log_requests=True, api_keys_file=file)
    metadata = (("authorization", f"Bearer {key}"),)
    for _ in range(2):
        request = inference.GenerateRequest(text="", request_label="mine", traceparent=CLIENT.traceparent)
        await error_of(router.inference.Generate(request, metadata=metadata))
    records = [record for record in caplog.records if record.name == "pdserve.router.frontend.records"]
    written = [json.loads(JsonFormatter("router").format(record)) for record in records]
    same = {"tenant": "acme", "label": "mine", "trace_id": CLIENT.trace_id}
    assert written[0].items() >= {**same, "status": "INVALID_ARGUMENT"}.items()
    assert "text: it is empty" in written[0]["message"]
    assert written[1].items() >= {**same, "status": "RESOURCE_EXHAUSTED", "cause": "tenant_requests"}.items()
    assert len(written) == 2
