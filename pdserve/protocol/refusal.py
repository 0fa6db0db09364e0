"""Every way in which a request ends without its answer: the cause, and what each protocol tells the client.

`_TABLE` is the one place that says which statuses follow from a cause.
"""

from enum import Enum, StrEnum

from pdserve.base.values import value


class Status(Enum):
    """Why a request ended without its answer, in gRPC's vocabulary."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    NOT_FOUND = "NOT_FOUND"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class Cause(StrEnum):
    """What binds a request, or ends it."""

    # An objective, as `router/placement/goodput.py` predicts it.
    QUEUE = "queue"  # prompts that are computed before it
    PREFILL = "prefill"  # computing its own prompt
    FETCH = "fetch"  # pages of its prompt that another worker holds
    HANDOFF = "handoff"  # moving its KV to the decode worker
    BATCH = "batch"  # the sequences that decode beside it
    PROMPTS = "prompts"  # that its decode worker computes
    PAGES = "pages"  # none are free on a decode worker
    ROWS = "rows"  # of a decode worker's batch: none is free
    RESERVED = "reserved"  # decode workers leave the time that is left to hand-offs
    IDLE_CLUSTER = "idle_cluster"  # even that cannot meet the objective
    # Workers: `router/placement/routing.py`.
    NO_PREFILL = "no_prefill"  # no prefill worker is ready
    NO_DECODE = "no_decode"  # no decode worker is ready
    NO_PAIR = "no_pair"  # workers are ready, and no two of them can hand KV over
    # Its place among other requests: `router/requests/admission.py`.
    SLOTS = "slots"  # as many requests are placed as may be
    TURN = "turn"  # others wait before it
    # The limits of its tenant: `router/frontend/limits.py`.
    TENANT_REQUESTS = "tenant_requests"  # its tenant sends more requests than it may
    TENANT_TOKENS = "tenant_tokens"  # its tenant uses more tokens than it may
    TENANT_CONCURRENCY = "tenant_concurrency"  # as many of its tenant's requests are under way as may be
    # The request itself, and its client.
    INVALID = "invalid"  # a field is wrong; the message begins with its name
    NO_KEY = "no_key"  # no API key is shown: `router/frontend/clients.py`
    WRONG_KEY = "wrong_key"  # the key is not known
    MODEL = "model"  # it is not served here: `router/frontend/served.py`
    PREPARING = "preparing"  # too many prompts or grammars are prepared: `router/frontend/prompts.py`, `grammar`
    COMPILER = "compiler"  # of grammars: its process has ended
    DEADLINE = "deadline"  # it has passed
    CANCELLED = "cancelled"  # the client has left, or has aborted the request
    SLOW_READER = "slow_reader"  # too much of the answer waits for the client
    # What went wrong here: `router/requests/retry.py`, `router/frontend/routers.py`.
    LOST_WORKERS = "lost_workers"  # workers were lost, or their peers failed them, too often
    FAILED = "failed"  # it fails on every worker
    SUSPECT = "suspect"  # it is suspected of ending workers
    SHUTTING_DOWN = "shutting_down"
    NO_ROUTER = "no_router"  # a frontend has none
    INTERNAL = "internal"  # an error of the router or the frontend
    # The HTTP request: `router/frontend/openai`.
    NO_ROUTE = "no_route"  # nothing has this path
    NOT_KEPT = "not_kept"  # a response, conversation or item: `router/frontend/responses/store.py`
    BACKGROUND = "background"  # as many responses are computed in the background as may be
    METHOD = "method"  # the path has not this one
    HOST = "host"  # the Host header does not name this machine
    TOO_LATE = "too_late"  # the request did not come in time
    TOO_LARGE = "too_large"  # the body
    MEDIA_TYPE = "media_type"  # of the body
    HEADERS = "headers"  # they are too large
    CONNECTIONS = "connections"  # too many are open


@value
class ErrorResponse:
    """What a protocol answers in place of tokens: statuses, codes and headers."""

    status: Status  # over gRPC
    http: int  # the status over HTTP
    error_type: str = "invalid_request_error"  # as in OpenAI's errors
    code: str | None = None  # likewise
    retry_after_s: float | None = None  # where another try may help, and nobody knows better when; None: at no time
    is_final: bool = False  # clients that try again after this HTTP status are told not to
    headers: tuple[tuple[bytes, bytes], ...] = ()  # of the HTTP response


_EXHAUSTED = Status.RESOURCE_EXHAUSTED, 429, "rate_limit_error"
_CLOSE = ((b"connection", b"close"),)  # what else is sent is not read
_TABLE: tuple[tuple[ErrorResponse, tuple[Cause, ...]], ...] = (
    (
        ErrorResponse(*_EXHAUSTED, "overloaded", 1.0),
        (
            *(Cause.QUEUE, Cause.PREFILL, Cause.FETCH, Cause.HANDOFF, Cause.BATCH, Cause.PROMPTS, Cause.PAGES),
            *(Cause.ROWS, Cause.RESERVED, Cause.SLOTS, Cause.TURN, Cause.PREPARING, Cause.SLOW_READER),
            Cause.BACKGROUND,
        ),
    ),
    (ErrorResponse(*_EXHAUSTED, "overloaded", 1.0, is_final=True), (Cause.IDLE_CLUSTER,)),
    (
        ErrorResponse(*_EXHAUSTED, "rate_limit_exceeded", 1.0),
        (Cause.TENANT_REQUESTS, Cause.TENANT_TOKENS, Cause.TENANT_CONCURRENCY),
    ),
    (
        ErrorResponse(Status.UNAVAILABLE, 503, "overloaded_error", "unavailable", 1.0),
        (
            *(Cause.NO_PREFILL, Cause.NO_DECODE, Cause.NO_PAIR, Cause.LOST_WORKERS),
            *(Cause.SHUTTING_DOWN, Cause.NO_ROUTER, Cause.CONNECTIONS, Cause.COMPILER),
        ),
    ),
    (ErrorResponse(Status.INVALID_ARGUMENT, 400), (Cause.INVALID,)),
    (
        ErrorResponse(
            *(Status.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"),
            headers=((b"www-authenticate", b"Bearer"),),
        ),
        (Cause.NO_KEY, Cause.WRONG_KEY),
    ),
    (ErrorResponse(Status.NOT_FOUND, 404, "not_found_error", "model_not_found"), (Cause.MODEL,)),
    (
        ErrorResponse(Status.DEADLINE_EXCEEDED, 504, "timeout_error", "deadline_exceeded", is_final=True),
        (Cause.DEADLINE,),
    ),
    (ErrorResponse(Status.CANCELLED, 499, "request_cancelled"), (Cause.CANCELLED,)),
    (ErrorResponse(Status.INTERNAL, 500, "server_error", is_final=True), (Cause.FAILED, Cause.SUSPECT, Cause.INTERNAL)),
    (ErrorResponse(Status.NOT_FOUND, 404, "not_found_error", "not_found"), (Cause.NO_ROUTE,)),
    (ErrorResponse(Status.NOT_FOUND, 404, code="not_found"), (Cause.NOT_KEPT,)),
    (ErrorResponse(Status.INVALID_ARGUMENT, 403, code="host_not_allowed"), (Cause.HOST,)),
    (ErrorResponse(Status.INVALID_ARGUMENT, 405), (Cause.METHOD,)),
    (ErrorResponse(Status.INVALID_ARGUMENT, 408, is_final=True), (Cause.TOO_LATE,)),
    (ErrorResponse(Status.INVALID_ARGUMENT, 413, headers=_CLOSE), (Cause.TOO_LARGE,)),
    (ErrorResponse(Status.INVALID_ARGUMENT, 415), (Cause.MEDIA_TYPE,)),
    (ErrorResponse(Status.INVALID_ARGUMENT, 431, headers=_CLOSE), (Cause.HEADERS,)),
)
ERROR_RESPONSES = {cause: response for response, causes in _TABLE for cause in causes}


@value
class Refused:
    """An end without the answer. The message is for the client: it names what binds, with figures and limits."""

    cause: Cause
    message: str
    predicted_ttft_s: float | None = None  # set where an objective was the reason
    retry_after_s: float | None = None  # set where it is known when trying again may help

    @property
    def response(self) -> ErrorResponse:
        return ERROR_RESPONSES[self.cause]

    @property
    def status(self) -> Status:
        return ERROR_RESPONSES[self.cause].status

    def __str__(self) -> str:
        return f"{self.status.value}: {self.message}"


class RefusedError(Exception):
    """One request ends without its answer; no other request is affected."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


def invalid(field: str, problem: str) -> RefusedError:
    """Return the error for a field of a request that breaks a rule, e.g. invalid("n", "9 is over the limit of 8")."""
    return RefusedError(Refused(Cause.INVALID, f"{field}: {problem}"))


CLIENT_GONE = Refused(Cause.CANCELLED, "the client has gone")


def reads_too_slowly(limit_bytes: int) -> Refused:
    """Return the end of an answer whose client let more than that wait."""
    return Refused(Cause.SLOW_READER, f"client reads too slowly: {limit_bytes} bytes of its answer wait")
