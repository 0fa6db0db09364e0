"""What web pages may ask of the HTTP endpoint: a browser sends their requests from this very machine.

Invariant: a page of another site gets no answer that it may read, and starts no work, unless `allowed_origins` names
its origin. Three rules bring that about.

- Without API keys a request is served only if its `Host` header names this machine. Otherwise a site could let a name
  of its own lead to a loopback address (DNS rebinding), and its pages would count as ours.
- The body of a POST must be declared as JSON. A page may send other bodies to any site without asking first.
- Answers say that pages of other origins may read them (CORS) only for the origins that the operator has named.
"""

from collections.abc import Iterable

from starlette.types import Message, Scope, Send

from pdserve.base.errors import echo
from pdserve.net.rpc import is_loopback
from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.openai.errors import Header

ANY_ORIGIN = "*"
READABLE = (  # headers of responses that pages of allowed origins may read
    b"x-request-id, x-pdserve-request-id, x-ignored-fields, retry-after, retry-after-ms, x-should-retry"
)
PREFLIGHT_AGE_S = 600  # for which browsers may remember what a preflight allowed
_ASKED_HEADERS, _ASKED_NETWORK = b"access-control-request-headers", b"access-control-request-private-network"
_ALLOW_ORIGIN = b"access-control-allow-origin"


class Sites:
    """Tells requests of allowed sites from those of others."""

    def __init__(self, config: EndpointConfig) -> None:
        self._needs_local_name = config.api_keys_file is None
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)

    def check_host(self, scope: Scope) -> None:
        """Raise RefusedError if no API keys are needed and the Host header does not name this machine."""
        hosts = _values(scope, b"host")
        if self._needs_local_name and not (hosts and all(map(self._is_ours, hosts))):
            shown = ", ".join(echo(repr(host)) for host in hosts) or "none is sent"
            text = "without API keys it has to be a loopback name, or one that allowed_hosts has"
            raise RefusedError(Refused(Cause.HOST, f"host: {text} ({shown})"))

    def headers(self, scope: Scope) -> tuple[Header, ...]:
        """Return what a response needs so that the page that asked may read it; nothing for pages of other origins."""
        if not self._origins:
            return ()
        vary = (b"vary", b"origin")
        origin = self._allowed_origin(scope)
        if origin is None:
            return (vary,)
        return (_ALLOW_ORIGIN, origin), (b"access-control-expose-headers", READABLE), vary

    def preflight(self, scope: Scope) -> tuple[Header, ...] | None:
        """Return the headers that answer a browser's question whether a page may send a request; None: it is none.

        A page of an allowed origin may send any headers: OpenAI's client sends a dozen of its own.
        """
        if scope["method"] != "OPTIONS" or not _values(scope, b"access-control-request-method"):
            return None
        if self._allowed_origin(scope) is None:
            return None
        asked = ", ".join(_values(scope, _ASKED_HEADERS)).encode("latin-1")
        network = ((b"access-control-allow-private-network", b"true"),) if _values(scope, _ASKED_NETWORK) else ()
        return (
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
            *network,
            *self.headers(scope),
        )

    def _allowed_origin(self, scope: Scope) -> bytes | None:
        origins = _values(scope, b"origin")
        if len(origins) == 1 and (ANY_ORIGIN in self._origins or origins[0].lower() in self._origins):
            return origins[0].encode("latin-1")
        return None

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this machine, whatever its port."""
        name = (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower().rstrip(".")
        return name in self._hosts or name.endswith(".localhost") or is_loopback(name)


def adding(headers: Iterable[Header], send: Send) -> Send:
    """Return an ASGI `send` that adds headers to a response that does not have them."""

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message["headers"]}
            message = {**message, "headers": [*message["headers"], *(each for each in headers if each[0] not in own)]}
        await send(message)

    return add


def check_json(scope: Scope) -> None:
    """Raise RefusedError unless a request's body is declared as JSON."""
    kinds = _values(scope, b"content-type")
    kind = kinds[0].partition(";")[0].strip().lower() if len(kinds) == 1 else ""
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    shown = ", ".join(echo(repr(each)) for each in kinds) or "none is sent"
    cure = "send the header 'content-type: application/json' (curl: -H 'content-type: application/json')"
    raise RefusedError(Refused(Cause.MEDIA_TYPE, f"content-type: a JSON body is needed ({shown}); {cure}"))


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return the values of a request's header, one for each time that the header is there."""
    return [value.decode("latin-1").strip() for found, value in scope["headers"] if found == name]
