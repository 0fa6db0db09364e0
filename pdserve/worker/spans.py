"""What a worker did for a traced request, as spans below the router's span of it.

They are made when the task ends: nothing is done for each token.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.base.ids import AttemptKey
from pdserve.observe.trace_context import Span, TraceContext
from pdserve.protocol.reports import Stage
from pdserve.worker.messages import Failed, Placed, Progress, Report

if TYPE_CHECKING:
    from pdserve.observe.tracing import SpanExport

# Name, stage that begins it, stage that ends it; None: the end of the task.
_PARTS = (
    ("fetch", Stage.PREFILL_QUEUED, Stage.FETCHED),
    ("prefill.queue", Stage.PREFILL_QUEUED, Stage.PREFILL_STARTED),
    ("prefill", Stage.PREFILL_STARTED, Stage.PREFILL_DONE),
    ("handoff.receive", Stage.GRANTED, Stage.COMMITTED),
    ("decode.queue", Stage.COMMITTED, Stage.DECODE_JOINED),
    ("decode", Stage.DECODE_JOINED, None),
)
_REQUIRED_END = {Stage.FETCHED}  # a part that is not there unless it was reached


@dataclass(slots=True)
class _Task:
    trace: TraceContext
    placed: Placed
    placed_s: float
    reached: dict[Stage, Progress] = field(default_factory=dict)
    error: str = ""


class TaskSpans:
    def __init__(self, export: "SpanExport", has_task: Callable[[AttemptKey], bool]) -> None:
        self._export = export
        self._has_task = has_task
        self._tasks: dict[AttemptKey, _Task] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """How many spans have been sent, failed and dropped."""
        return self._export.counts

    def begin(self, placed: Placed, now_s: float) -> None:
        """Note a job that the core is about to be given. One that it refuses ends with the commands that follow."""
        job, trace = placed.job, placed.trace
        key = AttemptKey(job.request_id, job.attempt)
        if trace is not None and trace.is_sampled and key not in self._tasks:
            self._tasks[key] = _Task(trace, placed, now_s)

    def follow(self, reports: Iterable[Report], now_s: float) -> None:
        """Note the stages that the core has reported, then send the spans of the tasks that have ended."""
        if not self._tasks:
            return
        for command in reports:
            if isinstance(command, Progress | Failed) and (task := self._tasks.get(command.key)) is not None:
                if isinstance(command, Failed):
                    task.error = command.reason
                else:
                    task.reached.setdefault(command.stage, command)
        for key in [key for key in self._tasks if not self._has_task(key)]:
            task = self._tasks.pop(key)
            self._export.send(task.trace, _spans(task, now_s))


def _spans(task: _Task, end_s: float) -> Iterator[Span]:
    job, parent_id = task.placed.job, task.trace.span_id
    ids: dict[str, str | int] = {"pdserve.request.id": job.request_id.hex(), "pdserve.attempt": int(job.attempt)}
    if task.error:
        yield Span("failed attempt", task.placed_s, end_s, ids, parent_id, error=task.error)
    for name, begins, ends in _parts(task.placed):
        start, end = task.reached.get(begins), task.reached.get(ends) if ends else None
        if start is None or (end is None and ends in _REQUIRED_END):
            continue
        attributes = {**ids, **_figures(name, task)}
        yield Span(name, start.at_s, max(start.at_s, end.at_s if end else end_s), attributes, parent_id)


def _parts(placed: Placed) -> Iterator[tuple[str, Stage, Stage | None]]:
    yield from _PARTS
    if placed.target is not None:
        yield "handoff.send", Stage.PREFILL_DONE, None
    elif placed.source is None:
        yield "decode", Stage.PREFILL_DONE, None


def _figures(name: str, task: _Task) -> dict[str, str | int]:
    placed, reached = task.placed, task.reached
    match name:
        case "prefill":
            started = reached[Stage.PREFILL_STARTED]
            tokens = {"pdserve.prompt_tokens": placed.job.num_prompt_tokens}
            return {**tokens, "gen_ai.usage.cache_read.input_tokens": started.cached_tokens}
        case "handoff.send" if placed.target is not None:
            return {"pdserve.target": placed.target.worker_id}
        case "handoff.receive" if placed.source is not None:
            landed = reached.get(Stage.LANDED)
            size = {} if landed is None else {"pdserve.handoff.bytes": landed.handoff_bytes}
            reused = {"pdserve.handoff.pages_reused": reached[Stage.GRANTED].pages_reused}
            return {"pdserve.source": placed.source.worker_id, **size, **reused}
        case _:
            return {}
