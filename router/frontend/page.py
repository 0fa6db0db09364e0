"""The live page: its files for everybody, and its data for those who may see them.

    GET /                        the page; with ?model=NAME, of a model, by default of the first
    GET /page/FILE               its styles and scripts
    GET /page/events             a stream of server-sent events: a snapshot, then changes
    GET /page/requests/ID        everything about one request

The last two take ?model=NAME, too. If clients need keys, these two need one: a tenant sees the pools, and its own
requests. If clients need none, `openai/sites.py` keeps pages of other sites away.

Invariant: the router is asked for its state only while somebody watches, and at most once in PERIOD_S, however many
watch. A watcher that reads slowly misses states, and nothing is kept for it; one that does not read at all loses its
connection. A page that applies each change has the present state, with the requests that its tenant may see.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.frontend.backend import MAX_OF_STAGE, PERIOD_S, Backend, State
from pdserve.router.frontend.clients import Clients, bearer
from pdserve.router.frontend.openai.errors import response_of

PULSE_S = 1.0  # an event is sent at least so often, so that a page knows that it is still connected
MAX_WATCHERS = 16
MAX_OF_TENANT = 4  # of these watchers, if clients have keys

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def visible(state: State, tenant: str | None) -> State:
    """Return what a tenant may see of a state: its own requests (None: all), and of each stage the newest ones."""

    def own(section: str) -> dict[str, Any]:
        return {name: each for name, each in state[section].items() if tenant is None or each["tenant"] == tenant}

    requests, newest = own("requests"), dict[str, Any]()
    num_left = Counter(each["stage"] for each in requests.values())
    for name, each in requests.items():
        if num_left[each["stage"]] <= MAX_OF_STAGE:
            newest[name] = each
        num_left[each["stage"]] -= 1
    return {**state, "requests": newest, "ended": own("ended")}


def difference(before: State, after: State) -> dict[str, dict[str, object]]:
    """Return the entries of each section that have changed; None stands for an entry that is gone."""
    changes: dict[str, dict[str, object]] = {}
    for section, entries in after.items():
        known = before.get(section, {})
        changed = {name: entry for name, entry in entries.items() if known.get(name) != entry}
        gone = dict.fromkeys(name for name in known if name not in entries)
        if changed or gone:
            changes[section] = {**changed, **gone}
    return changes


class Page:
    """The page. `app` serves the paths for which `serves` is true, and checks keys itself."""

    def __init__(self, backend: Backend, clients: Clients, others: Sequence[str] = ()) -> None:
        """`others`: models at this address, each with a page at `/?model=NAME`."""
        self._backend = backend
        self._models: State = {"models": {name: {} for name in others}} if others else {}
        self._state: State = {}  # the latest
        self._asked_s = float("-inf")  # when it was asked for
        self._asking = asyncio.Lock()
        self._clients = clients
        self._clock = backend.clock
        self._files = _read_files()
        self._watchers: Counter[str | None] = Counter()  # by tenant
        routes = (
            Route("/", self._file),
            Route("/page/requests/{request_id}", self._request),
            Route("/page/{name}", self._file),
        )
        self._router = Router(routes)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Starlette's router has no routes that write to `send`, so events do not go through it."""
        await (self._events if scope["path"] == "/page/events" else self._router)(scope, receive, send)

    @property
    def num_watchers(self) -> int:
        return self._watchers.total()

    @staticmethod
    def serves(path: str) -> bool:
        """Return whether a path is the page's."""
        return path == "/" or path.startswith("/page/")

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params.get("name", "index.html"))
        if found is None:
            return response_of(Refused(Cause.NO_ROUTE, "no such file"), _HEADERS)
        content, media_type, tag = found
        headers = {**_HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    async def _request(self, request: Request) -> Response:
        try:
            tenant = self._tenant(request.headers)
        except RefusedError as error:
            return response_of(error.refused, _HEADERS)
        known = await self._backend.live_request(request.path_params["request_id"])
        if known is None or tenant not in (None, known["tenant"]):
            return response_of(Refused(Cause.NO_ROUTE, "the request is not known, or no longer"), _HEADERS)
        return JSONResponse(known, headers=_HEADERS)

    def _tenant(self, headers: Mapping[str, str]) -> str | None:
        """Return the tenant whose requests may be seen; None: everybody's. Raises RefusedError."""
        client = self._clients.identify(bearer(headers.items()))
        return None if client is None else client.tenant

    async def _latest(self) -> State:
        """Return the router's state, at most PERIOD_S old."""
        async with self._asking:
            if self._clock.now_s() >= self._asked_s + PERIOD_S:
                self._state = await self._backend.live() | self._models
                self._asked_s = self._clock.now_s()
        return self._state

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            tenant = self._tenant(headers)
            self._check_room(tenant)
        except RefusedError as error:
            await response_of(error.refused, _HEADERS)(scope, receive, send)
            return
        left = asyncio.ensure_future(_left(receive))
        self._watchers[tenant] += 1
        try:
            await self._stream(headers, send, left)
        except RefusedError:
            pass  # its key is no longer valid: the stream ends here
        finally:
            self._watchers -= Counter([tenant])  # drops a count of zero
            left.cancel()

    def _check_room(self, tenant: str | None) -> None:
        if self.num_watchers >= MAX_WATCHERS:
            raise RefusedError(Refused(Cause.CONNECTIONS, f"{MAX_WATCHERS} pages watch already"))
        if tenant is not None and self._watchers[tenant] >= MAX_OF_TENANT:
            raise RefusedError(Refused(Cause.CONNECTIONS, f"{MAX_OF_TENANT} pages of this tenant watch already"))

    async def _stream(self, headers: Headers, send: Send, left: asyncio.Future[None]) -> None:
        """Send states until the watcher has left, or the router shuts down."""
        start = {**_HEADERS, "Content-Type": "text/event-stream"}
        raw = [(name.lower().encode(), text.encode()) for name, text in start.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        sent: State = {}
        sent_s = float("-inf")
        while not left.done() and self._backend.readiness().is_live:
            state = visible(await self._latest(), self._tenant(headers))
            clock = state.pop("clock")
            changes, now_s = difference(sent, state), self._clock.now_s()
            if not sent:
                changes["clock"] = clock
            if changes or now_s >= sent_s + PULSE_S:
                text = json.dumps(changes, separators=(",", ":"))
                body = f"event: {'change' if sent else 'snapshot'}\ndata: {text}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                sent, sent_s = state, now_s
            await asyncio.wait((left,), timeout=PERIOD_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@cache
def _read_files() -> dict[str, tuple[bytes, str, str]]:
    """Return the page's files by name: what is in each, its type, and a tag that names its content."""
    found = {}
    for file in (files(__package__) / "static").iterdir():
        content, suffix = file.read_bytes(), file.name.rpartition(".")[2]
        found[file.name] = content, _TYPES[suffix], f'"{sha256(content).hexdigest()[:16]}"'
    return found
