"""Errors as OpenAI's clients know them: a status, `{"error": {message, type, param, code}}`, and when to try again."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from pdserve.errors import RequestError, Status, echo
from pdserve.router.because import Cause
from pdserve.router.commands import Refused
from pdserve.router.frontend.clients import DeniedError, RefusedError

logger = logging.getLogger(__name__)

STATUS = {
    Status.INVALID_ARGUMENT: 400,
    Status.NOT_FOUND: 404,
    Status.DEADLINE_EXCEEDED: 504,
    Status.RESOURCE_EXHAUSTED: 429,
    Status.UNAVAILABLE: 503,
    Status.CANCELLED: 499,
    Status.INTERNAL: 500,
}
TYPES = {  # OpenAI's type of an error, and its code unless it has another, by status
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "model_not_found"),
    429: ("rate_limit_error", "overloaded"),
    499: ("request_cancelled", None),
    503: ("overloaded_error", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}
OF_TENANT = frozenset({Cause.TENANT_REQUESTS, Cause.TENANT_TOKENS, Cause.TENANT_CONCURRENCY})
RETRY_AFTER_S = 1.0  # if nobody knows when there will be room
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]-]*)(?: entries| tokens?)?: ")
_NAMES = {"text": "prompt", "token_ids": "prompt", "chat": "messages"}  # of inference.proto's fields, over HTTP
_NAME = re.compile(r"[a-z_]+")  # of a field
_KINDS = frozenset({"str", "int", "float", "bool", "dict", "list"})  # pydantic names members of a union like fields
_TOO_LONG = re.compile(r"maximum context length is \d+ tokens \(max_model_len\)$")

Header = tuple[bytes, bytes]
JSON: tuple[Header, ...] = ((b"content-type", b"application/json"),)


@dataclass(slots=True, eq=False)
class HttpError(Exception):
    """An error response."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[Header, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # beside OpenAI's four fields

    def body(self) -> bytes:
        """Return the JSON of the response, or of an event in a stream."""
        kind, code = TYPES.get(self.status, ("invalid_request_error" if self.status < 500 else "server_error", None))
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or code}
        return msgspec.json.encode({"error": {**error, **self.more}})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the response, with headers besides its own."""
        own = {name.decode(): content.decode() for name, content in (*JSON, *self.headers)}
        return Response(self.body(), self.status, own | dict(headers or {}))


def error_of(error: Exception) -> HttpError:
    """Return the response for an error of a request. Unexpected errors are logged."""
    match error:
        case HttpError():
            return error
        case DeniedError():
            return HttpError(401, error.message, headers=((b"www-authenticate", b"Bearer"),))
        case RefusedError():
            return _refused(error.refused)
        case RequestError():
            return _refused(Refused(error.status, error.message))
        case ValidationError():
            return _first_invalid(error.errors(include_url=False, include_context=False))
        case RequestValidationError():
            return _first_invalid(error.errors())
        case UnicodeEncodeError():
            return HttpError(400, "body: it has half of a surrogate pair, which is no text")
        case _:
            logger.error("a request failed", exc_info=error)
            return HttpError(500, "the router failed", headers=_try_no_more(500))


def _refused(refused: Refused) -> HttpError:
    status, message, found = STATUS[refused.status], refused.message, _FIELD.match(refused.message)
    param = found[1] if found else None
    if param in _NAMES:
        message, param = _NAMES[param] + message.removeprefix(param), _NAMES[param]
    cause = None if refused.because is None else refused.because.cause
    more: dict[str, Any] = {} if cause is None else {"refused_because": cause.value}
    if refused.predicted_ttft_s is not None:
        more["predicted_ttft_ms"] = round(refused.predicted_ttft_s * 1e3)
    code = None
    if _TOO_LONG.search(message):
        code = "context_length_exceeded"
        message += f": {code}"  # OpenAI's client shows the message alone, and LangChain looks for the code in it
    if cause in OF_TENANT:
        code = "rate_limit_exceeded"
    headers = _try_no_more(status)
    if status in (429, 503):
        # Trying again does not help if even an idle cluster could not meet the objective.
        headers = try_again(refused.retry_after_s or RETRY_AFTER_S, helps=cause is not Cause.IDLE_CLUSTER)
    return HttpError(status, message, param, code, headers, more)


def try_again(after_s: float, *, helps: bool = True) -> tuple[Header, ...]:
    """Return headers that say when to try again; not `helps`: that another try would fail, too."""
    return (
        (b"retry-after", b"%d" % max(1, ceil(after_s))),
        (b"retry-after-ms", b"%d" % max(1, ceil(after_s * 1e3))),
        (b"x-should-retry", b"true" if helps else b"false"),
    )


def _try_no_more(status: int) -> tuple[Header, ...]:
    """Return the header that keeps OpenAI's client from trying again, which it does after 408, 409 and any 5xx."""
    return ((b"x-should-retry", b"false"),) if status >= 500 else ()


def _first_invalid(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """Return the response for the first of pydantic's errors."""
    first = errors[0]
    place = [str(each) for each in first["loc"] if isinstance(each, int) or _NAME.fullmatch(each)]
    place = [each for each in place if each not in _KINDS]
    param = ".".join(place).removeprefix("body.") or None
    shown = "" if first["type"] in ("missing", "json_invalid") else f" ({echo(repr(first['input']))})"
    text = first["msg"].removeprefix("Value error, ")
    return HttpError(400, f"{param or 'body'}: {text[:1].lower()}{text[1:]}{shown}", param)
