"""Trace context, spans on their way to a collector, and what workers make spans of."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from otlp_sink import Sink, collector

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.engine.sequence import Job
from pdserve.launch.folder import free_port
from pdserve.observe import tracing
from pdserve.observe.trace_context import Span, TraceContext, read_trace
from pdserve.observe.tracing import SpanExport
from pdserve.protocol.reports import Failure, Stage
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.messages import Failed, Placed, Progress, RouterRef
from pdserve.worker.spans import TaskSpans

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE = TraceContext(TRACE_ID, PARENT_ID, 1, "vendor=1")
KEY = AttemptKey(RequestId(b"r" * 16), Attempt(2))
JOB = Job(*KEY, (1, 2, 3), 3, SamplingParams(seed=1), (0,))
OTHER = Peer(WorkerId("other"), Incarnation(9))


def test_a_context_is_read_as_it_is_written() -> None:
    assert TRACE.traceparent == f"00-{TRACE_ID}-{PARENT_ID}-01"
    assert read_trace(TRACE.traceparent, "vendor=1") == TRACE


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "00",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-1",
        "00-" + "a" * 10_000,
    ],
)
def test_a_malformed_context_counts_as_none(wrong: str) -> None:
    assert read_trace(wrong) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    read = read_trace(f"cc-{TRACE_ID}-{PARENT_ID}-01-more")
    assert read == TraceContext(TRACE_ID, PARENT_ID, 1)


@pytest.mark.parametrize("state", ["a=" + "b" * 511, "a=ü", "a=b\nc"])
def test_a_state_that_cannot_be_passed_on_is_left_out(state: str) -> None:
    assert read_trace(TRACE.traceparent, state) == TraceContext(TRACE_ID, PARENT_ID, 1)


@asynccontextmanager
async def exporting(endpoint: str) -> AsyncIterator[SpanExport]:
    export = SpanExport(endpoint, "pdserve-test", "one")
    try:
        yield export
    finally:
        await export.close()


async def test_a_span_arrives_with_its_ids_its_length_and_the_time_of_day() -> None:
    async with collector() as sink, exporting(sink.address) as export:
        now_s, began_ns = time.monotonic(), time.time_ns()
        export.send(TRACE, [Span("prefill", now_s - 0.25, now_s, {"n": 3, "who": ["a", "b"]}, PARENT_ID, error="lost")])
        await export.close()
        (received,) = sink.spans
    assert (received.service, received.instance, received.name) == ("pdserve-test", "one", "prefill")
    assert received.span.trace_id.hex() == TRACE_ID
    assert received.span.parent_span_id.hex() == PARENT_ID
    assert received.span.trace_state == "vendor=1"
    assert received.attributes == {"n": 3, "who": ["a", "b"]}
    assert received.span.status.message == "lost"
    assert received.seconds == pytest.approx(0.25, abs=1e-6)
    assert abs(received.span.end_time_unix_nano - began_ns) < 1e9
    assert export.counts == {"sent": 1, "failed": 0, "dropped": 0}


async def test_the_parent_of_a_span_is_remote_where_another_process_has_made_it() -> None:
    top = Span("top", 0.0, 1.0, {}, PARENT_ID)
    async with collector() as sink, exporting(sink.address) as export:
        export.send(TRACE, [top, Span("part", 0.0, 1.0, {}, top.span_id)])
        await export.close()
    is_remote = {name: bool(sink.named(name)[0].span.flags & 0x200) for name in ("top", "part")}
    assert is_remote == {"top": True, "part": False}


async def test_a_collector_that_is_away_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_WAITING", 20)
    monkeypatch.setattr(tracing, "BATCH", 20)
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.1)
    export = SpanExport(f"http://127.0.0.1:{free_port('127.0.0.1')}", "pdserve-test", "one")
    export.send(TRACE, [Span("s", 0.0, 1.0, {}, PARENT_ID) for _ in range(50)])
    assert export.counts["dropped"] == 30, "it did not wait for room"
    async with asyncio.timeout(10):
        await export.close()
    assert export.counts == {"sent": 0, "failed": 20, "dropped": 30}


def follow(spans: TaskSpans, placed: Placed, *reached: tuple[Stage, float], end_s: float) -> None:
    spans.begin(placed, 0.5)
    reports = [Progress(placed.router, KEY, stage, at_s, cached_tokens=2, handoff_bytes=64) for stage, at_s in reached]
    spans.follow(reports, end_s)


async def shown(sink: Sink, placed: Placed, *reached: tuple[Stage, float], end_s: float) -> dict[str, float]:
    """Return the lengths of a task's spans, by name."""
    async with exporting(sink.address) as export:
        follow(TaskSpans(export, lambda _: False), placed, *reached, end_s=end_s)
    assert all(span.attributes["pdserve.request.id"] == JOB.request_id.hex() for span in sink.spans)
    assert all(span.span.parent_span_id.hex() == PARENT_ID for span in sink.spans)
    return {span.name: round(span.seconds, 6) for span in sink.spans}


async def test_a_prefill_workers_spans_are_queue_prompt_and_hand_off() -> None:
    placed = Placed(RouterRef(1), JOB, 99.0, target=OTHER, target_address="a:1", trace=TRACE)
    stages = (Stage.PREFILL_QUEUED, 1.0), (Stage.PREFILL_STARTED, 1.5), (Stage.PREFILL_DONE, 3.5)
    async with collector() as sink:
        lengths = await shown(sink, placed, *stages, end_s=4.5)
    assert lengths == {"prefill.queue": 0.5, "prefill": 2.0, "handoff.send": 1.0}
    assert sink.named("handoff.send")[0].attributes["pdserve.target"] == "other"
    assert sink.named("prefill")[0].attributes["gen_ai.usage.cache_read.input_tokens"] == 2


async def test_a_decode_workers_spans_are_hand_off_queue_and_answer() -> None:
    placed = Placed(RouterRef(1), JOB, 99.0, source=OTHER, trace=TRACE)
    stages = (Stage.GRANTED, 1.0), (Stage.LANDED, 1.25), (Stage.COMMITTED, 1.5), (Stage.DECODE_JOINED, 2.0)
    async with collector() as sink:
        lengths = await shown(sink, placed, *stages, end_s=5.0)
    assert lengths == {"handoff.receive": 0.5, "decode.queue": 0.5, "decode": 3.0}
    assert sink.named("handoff.receive")[0].attributes["pdserve.handoff.bytes"] == 64


async def test_a_failed_attempt_says_of_what_it_failed() -> None:
    placed = Placed(RouterRef(1), JOB, 99.0, target=OTHER, target_address="a:1", trace=TRACE)
    async with collector() as sink, exporting(sink.address) as export:
        spans = TaskSpans(export, lambda _: False)
        spans.begin(placed, 1.0)
        spans.follow([Failed(RouterRef(1), KEY, Failure.PEER_LOST, "gone")], 2.0)
        await export.close()
    (span,) = sink.spans
    assert (span.name, span.span.status.message, span.attributes["pdserve.attempt"]) == ("failed attempt", "gone", 2)


async def test_nothing_is_made_of_a_request_that_is_not_sampled_or_goes_on() -> None:
    async with collector() as sink, exporting(sink.address) as export:
        unsampled = TraceContext(TRACE_ID, PARENT_ID, 0)
        follow(TaskSpans(export, lambda _: False), Placed(RouterRef(1), JOB, 99.0, trace=unsampled), end_s=2.0)
        going_on = TaskSpans(export, lambda _: True)
        follow(going_on, Placed(RouterRef(1), JOB, 99.0, trace=TRACE), (Stage.PREFILL_QUEUED, 1.0), end_s=2.0)
        await export.close()
        assert sink.spans == []
