"""Spans of requests, and W3C Trace Context: which span of which trace a request belongs to.

`traceparent` and `tracestate` carry the latter from client to router and from router to worker.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import field

from pdserve.values import value

MAX_TRACESTATE_CHARS = 512
SAMPLED = 0x01
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@value
class TraceContext:
    """A span that others are made below."""

    trace_id: str  # 32 hexadecimal digits, not all 0
    span_id: str  # 16 hexadecimal digits, not all 0
    flags: int  # a byte
    tracestate: str = ""  # of other vendors, passed on as it came

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
    """What happened from one moment to another, both on this process's clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes
    parent_id: str  # empty: its trace begins with it
    span_id: str = field(default_factory=new_span_id)
    error: str = ""  # what it failed of, if it did
    answers_client: bool = False


def read_trace(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the two fields; None where `traceparent` is missing, or invalid, which the standard says to ignore.

    Of versions above 00 the fields are read that 00 has. A `tracestate` that is too long is left out.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (traceparent.strip().startswith("00") and found[4]):
        return None
    trace_id, span_id, flags = found[1], found[2], int(found[3], 16)
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    is_sound = len(tracestate) <= MAX_TRACESTATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    return TraceContext(trace_id, span_id, flags, tracestate if is_sound else "")
