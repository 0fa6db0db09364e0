"""Where an answer's text becomes something else than content: tool calls, reasoning.

A filter belongs to one choice of one response. Deltas are as in OpenAI's chunks: `{"content": ...}`,
`{"reasoning_content": ...}`, `{"tool_calls": [{"index": 0, ...}]}`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.errors import invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.openai.fields import ChatRequest, Generation
from pdserve.router.frontend.prompts import ServedModel

Delta = dict[str, Any]


class TextFilter(Protocol):
    """Turns the text of one choice into deltas. Called on the event loop: must neither wait nor raise."""

    def push(self, text: str) -> list[Delta]:
        """Take the text gained; return what the message gains by it."""

    def finish(self, finish_reason: str) -> tuple[list[Delta], str]:
        """End the text; return what was held back, and the finish reason to report."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's fields for output and tools come to."""

    new_filter: Callable[[], TextFilter] | None = None  # for each choice; None: text is content


def plan(body: Generation, request: inference.GenerateRequest, model: ServedModel) -> Plan:
    """Write what constrains the output into `request`; RequestError(INVALID_ARGUMENT) names the field refused."""
    del request, model
    _refuse_until_served(body)
    return Plan()


def _refuse_until_served(body: Generation) -> None:
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise invalid("response_format", f"{kind!r} is not supported; 'text' is")
    if body.structured_outputs:
        raise invalid("structured_outputs", "they are not supported")
    if isinstance(body, ChatRequest) and body.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "only 'none' and 'auto' are supported")
