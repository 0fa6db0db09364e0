"""Sends spans to an OpenTelemetry collector, with OTLP over gRPC. Slow to import: only if spans are wanted.

Invariant: nobody waits for a collector. At most MAX_WAITING spans are queued; a thread sends them. A span is dropped,
and counted, if the queue is full or it cannot be sent.

Spans are made from readings of the process's monotonic clock when what they describe is over, so their lengths are
exact. The wall clock is read once for each set of spans; spans of different machines agree as well as their wall clocks
do.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from pdserve import __version__
from pdserve.observe.metrics import DROPPED, FAILED, SENT
from pdserve.observe.trace_context import Span, TraceContext

logger = logging.getLogger(__name__)

MAX_WAITING = 8192  # spans that are queued or being sent
BATCH = 512  # spans sent at once
DELAY_S = 1.0  # until fewer spans than a batch are sent
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0  # for the last spans of a process


class SpanExport:
    """A process's connection to its collector. All methods except `close` return at once."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """`endpoint`: http://host:port, or https. Headers and certificates are read from OTEL_EXPORTER_OTLP_*."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # else it logs each failed try
        name = os.environ.get("OTEL_SERVICE_NAME", service)
        attributes = {"service.name": name, "service.instance.id": instance, "service.version": __version__}
        self._resource = Resource.create(attributes)
        self._exporter = _Counting(OTLPSpanExporter(endpoint, timeout=SEND_TIMEOUT_S), endpoint)
        self._processor = BatchSpanProcessor(self._exporter, MAX_WAITING, DELAY_S * 1e3, BATCH)
        self._num_queued = self._num_dropped = 0

    def send(self, trace: TraceContext, spans: Iterable[Span]) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        flags, state = TraceFlags(trace.flags), TraceState.from_header([trace.tracestate])
        trace_id, spans = int(trace.trace_id, 16), tuple(spans)
        ours = {span.span_id for span in spans}

        def context(span_id: str, *, is_remote: bool) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), is_remote, flags, state)

        for span in spans:
            if self._num_queued - self._exporter.counts.total() >= MAX_WAITING:
                self._num_dropped += 1
                continue
            self._num_queued += 1
            readable = ReadableSpan(
                name=span.name,
                context=context(span.span_id, is_remote=False),
                parent=context(span.parent_id, is_remote=span.parent_id not in ours) if span.parent_id else None,
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind.SERVER if span.answers_client else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=round(span.start_s * 1e9) + offset_ns,
                end_time=round(span.end_s * 1e9) + offset_ns,
            )
            self._processor.on_end(readable)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many spans were sent, failed and dropped."""
        return {**self._exporter.counts, DROPPED: self._num_dropped}

    async def close(self) -> None:
        """Send the queued spans, for CLOSE_TIMEOUT_S at most."""
        sending = asyncio.create_task(asyncio.to_thread(self._processor.force_flush), name="last spans")
        await asyncio.wait((sending,), timeout=CLOSE_TIMEOUT_S)
        self._exporter.shutdown()  # ends a running call, and the pause before another try
        await sending
        await asyncio.to_thread(self._processor.shutdown)


class _Counting(SpanExporter):
    """Counts spans that were sent or failed. The library's thread calls it."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._fails = False
        self.counts: Counter[str] = Counter({SENT: 0, FAILED: 0})

    def export(self, spans: Seq[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            fails = result is not SpanExportResult.SUCCESS
            self.counts[FAILED if fails else SENT] += len(spans)
            if fails is not self._fails:
                self._fails = fails
                logger.warning("spans %s %s", "cannot be sent to" if fails else "are sent again to", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
