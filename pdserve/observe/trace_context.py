"""Spans of requests, and W3C Trace Context, which says to which span of which trace a request belongs.

`traceparent` and `tracestate` carry the trace context from client to router and from router to worker.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import field

from pdserve.base.values import value

MAX_TRACESTATE_CHARS = 512
SAMPLED = 0x01
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@value
class TraceContext:
    """A span that is the parent of others."""

    trace_id: str  # 32 hexadecimal digits, not all 0
    span_id: str  # 16 hexadecimal digits, not all 0
    flags: int  # a byte
    tracestate: str = ""  # of other vendors, passed on unchanged

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


AttributeValue = str | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]


def new_span_id() -> str:
    return secrets.token_hex(8)


@value
class Span:
    """What happened between two moments of this process's clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes
    parent_id: str  # empty: the trace begins with this span
    span_id: str = field(default_factory=new_span_id)
    error: str = ""  # why it failed, if it did
    answers_client: bool = False


def read_trace(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the two fields; None if `traceparent` is missing, or invalid: the standard says to ignore it then.

    From versions above 00, the fields of version 00 are read. A `tracestate` that is too long is dropped.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (traceparent.strip().startswith("00") and found[4]):
        return None
    trace_id, span_id, flags = found[1], found[2], int(found[3], 16)
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    is_sound = len(tracestate) <= MAX_TRACESTATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    return TraceContext(trace_id, span_id, flags, tracestate if is_sound else "")
