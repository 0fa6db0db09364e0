"""A collector of traces for tests: takes what is exported with OTLP, and keeps it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 20.0


@dataclass
class Received:
    """A span as it came."""

    span: Span
    service: str
    instance: str
    attributes: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9


class Sink(TraceServiceServicer):
    """Keeps all spans."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Received] = []
        self.news = asyncio.Condition()

    async def Export(  # type: ignore[override]  # noqa: N802
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        async with self.news:
            for of_process in request.resource_spans:
                about = {each.key: each.value.string_value for each in of_process.resource.attributes}
                for scope in of_process.scope_spans:
                    self.spans += [
                        Received(span, about["service.name"], about["service.instance.id"], _attributes(span))
                        for span in scope.spans
                    ]
            self.news.notify_all()
        return ExportTraceServiceResponse()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(condition)

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]


def _attributes(span: Span) -> dict[str, object]:
    attributes: dict[str, object] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        given = getattr(each.value, kind) if kind else None
        attributes[each.key] = [item.string_value for item in given.values] if kind == "array_value" else given
    return attributes


@asynccontextmanager
async def collector() -> AsyncIterator[Sink]:
    """Run a collector; its `address` is what a process's `otlp_traces_endpoint` is to be."""
    sink, server = Sink(), grpc.aio.server()
    add_TraceServiceServicer_to_server(sink, server)
    sink.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield sink
    finally:
        await server.stop(None)


class Beside:
    """A collector in a thread of its own, for tests without an event loop."""

    def __init__(self, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.sink = sink
        self._loop = loop

    def until(self, condition: Callable[[], bool]) -> None:
        asyncio.run_coroutine_threadsafe(self.sink.until(condition), self._loop).result()


@contextmanager
def collector_beside() -> Iterator[Beside]:
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        sink = asyncio.run_coroutine_threadsafe(stack.enter_async_context(collector()), loop).result()
        yield Beside(sink, loop)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
