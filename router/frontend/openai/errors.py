"""Refusals as OpenAI's clients know them: `{"error": {message, type, param, code}}`, and headers for another try."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pdserve.base.errors import echo
from pdserve.protocol.refusal import Cause, Refused, RefusedError

logger = logging.getLogger(__name__)

_FIELD = re.compile(r"([A-Za-z_][\w.\[\]-]*)(?: entries| tokens?)?: ")
_NAMES = {"text": "prompt", "token_ids": "prompt", "chat": "messages"}  # of inference.proto's fields, over HTTP
_NAME = re.compile(r"[a-z_]+")  # of a field
_KINDS = frozenset({"str", "int", "float", "bool", "dict", "list"})  # pydantic names members of a union like fields
_TOO_LONG = re.compile(r"maximum context length is \d+ tokens \(max_model_len\)$")

Header = tuple[bytes, bytes]
JSON: tuple[Header, ...] = ((b"content-type", b"application/json"),)


def refused_by(error: Exception) -> Refused:
    """Return how a request ends that an error has ended. Unexpected errors are logged."""
    match error:
        case RefusedError():
            return error.refused
        case ValidationError():
            return _first_invalid(error.errors(include_url=False, include_context=False))
        case RequestValidationError():
            return _first_invalid(error.errors())
        case UnicodeEncodeError():
            return Refused(Cause.INVALID, "body: it has half of a surrogate pair, which is no text")
        case HTTPException(status_code=400):  # FastAPI's, where parsing raises what is no JSONDecodeError
            return Refused(Cause.INVALID, "body: it cannot be parsed as JSON")
        case HTTPException(status_code=404):
            return Refused(Cause.NO_ROUTE, error.detail)
        case HTTPException(status_code=405):
            return Refused(Cause.METHOD, error.detail)
        case _:
            logger.error("a request failed", exc_info=error)
            return Refused(Cause.INTERNAL, "the router failed")


def body_of(refused: Refused) -> bytes:
    """Return the JSON of a response, or of an event in a stream."""
    return msgspec.json.encode({"error": error_of(refused)})


def error_of(refused: Refused) -> dict[str, Any]:
    """Return what clients are told of a refusal."""
    message, response, found = refused.message, refused.response, _FIELD.match(refused.message)
    param, code = found[1] if found else None, response.code
    if param in _NAMES:
        message, param = _NAMES[param] + message.removeprefix(param), _NAMES[param]
    if _TOO_LONG.search(message):
        code = "context_length_exceeded"
        message += f": {code}"  # OpenAI's client shows the message alone, and LangChain looks for the code in it
    error: dict[str, Any] = {"message": message, "type": response.error_type, "param": param, "code": code}
    error["refused_because"] = refused.cause.value
    if refused.predicted_ttft_s is not None:
        error["predicted_ttft_ms"] = round(refused.predicted_ttft_s * 1e3)
    return error


def renaming(refused: Refused, names: Mapping[str, str]) -> Refused:
    """Return a refusal of a chat with the names that another API has for the chat's fields."""
    message = refused.message
    for ours, theirs in names.items():
        message = message.replace(ours, theirs)
    return replace(refused, message=message)


def headers_for(refused: Refused) -> tuple[Header, ...]:
    """Return the headers of a response. OpenAI's client tries again after 408, 409, 429 and 5xx unless one forbids."""
    response, after_s = refused.response, refused.retry_after_s or refused.response.retry_after_s
    headers = [*JSON, *response.headers]
    if response.retry_after_s is not None and after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(after_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, ceil(after_s * 1e3))))
        headers.append((b"x-should-retry", b"false" if response.is_final else b"true"))
    elif response.is_final:
        headers.append((b"x-should-retry", b"false"))
    return tuple(headers)


def response_of(refused: Refused, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response, with headers besides its own."""
    own = {name.decode(): content.decode() for name, content in headers_for(refused)}
    return Response(body_of(refused), refused.response.http, own | dict(headers or {}))


def _first_invalid(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """Return the end for the first of pydantic's errors."""
    first = errors[0]
    place = [str(each) for each in first["loc"] if isinstance(each, int) or _NAME.fullmatch(each)]
    place = [each for each in place if each not in _KINDS]
    param = ".".join(place).removeprefix("body.") or "body"
    shown = "" if first["type"] in ("missing", "json_invalid") else f" ({echo(repr(first['input']))})"
    text = first["msg"].removeprefix("Value error, ")
    return Refused(Cause.INVALID, f"{param}: {text[:1].lower()}{text[1:]}{shown}")
