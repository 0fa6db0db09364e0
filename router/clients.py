"""Who may call the public port: clients with a key of the file, and anybody who asks after its health."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Never, TypeVar

import grpc

from pdserve.clock import Clock
from pdserve.errors import Status, echo, invalid
from pdserve.router.api_keys import ApiKeys, Client, bearer, read_keys
from pdserve.router.because import Cause
from pdserve.router.commands import Refused
from pdserve.router.limits import Use
from pdserve.router.prompts import Terms
from pdserve.rpc import abort
from pdserve.values import value
from pdserve.watched import Watched

OPEN = "/grpc.health.v1.Health/"  # methods that need no key
NO_KEY, WRONG_KEY = DENIALS = ("no_key", "wrong_key")
_TEXTS = {NO_KEY: "no API key is shown: authorization: Bearer KEY", WRONG_KEY: "the API key is not known here"}

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Metadata = Iterable[tuple[str, str | bytes]]

CODES = {status: grpc.StatusCode[status.value] for status in Status}


class Clients:
    """The clients of one router, and what they use of their limits."""

    def __init__(self, file: Path | None, clock: Clock) -> None:
        """`file`: the API keys; None asks nobody for one."""
        self._keys = None if file is None else Watched((file,), partial(read_keys, file))
        self._seen: ApiKeys | None = None
        self._clock = clock
        self._uses: dict[str, Use] = {}  # by tenant
        self.denied: Counter[str] = Counter()  # calls, by what was wrong
        self.over_limit: Counter[Cause] = Counter()  # requests, by the limit

    @property
    def num_refused_files(self) -> int:
        """How often a file that had changed was refused."""
        return 0 if self._keys is None else self._keys.num_refused

    def look(self, metadata: Metadata | None) -> Client | str | None:
        """Return who calls, or what is wrong with the key; None where no keys are asked for."""
        if self._keys is None:
            return None
        keys, shown = self._keys.look(), bearer(metadata)
        if keys is not self._seen:
            self._seen = keys
            self._uses = {name: use for name, use in self._uses.items() if name in keys.tenants or use.num_running}
        if shown is None:
            return NO_KEY
        return keys.find(shown) or WRONG_KEY

    @asynccontextmanager
    async def visit(self, context: "grpc.aio.ServicerContext[_Request, _Response]") -> AsyncIterator["Visit | None"]:
        """Take a request in for the length of the block; None where no keys are asked for.

        A call with a wrong key, or over its tenant's limits, is ended instead.
        """
        client = self.look(context.invocation_metadata())
        if isinstance(client, str):
            await self.deny(client, context)
        if not isinstance(client, Client):
            yield None
            return
        use = self._uses.setdefault(client.tenant, Use())
        refused = use.begin(client.limits, self._clock.now_s())
        if refused is not None:
            if refused.because is not None:
                self.over_limit[refused.because.cause] += 1
            await refuse(context, refused)
        try:
            yield Visit(client, use)
        finally:
            use.end()

    async def deny(self, reason: str, context: "grpc.aio.ServicerContext[_Request, _Response]") -> Never:
        """End a call whose key is wrong."""
        self.denied[reason] += 1
        await abort(context, grpc.StatusCode.UNAUTHENTICATED, _TEXTS[reason])


@value
class Visit:
    """One request of a client."""

    client: Client
    use: Use  # of the client's tenant

    def terms(self, asked: Terms) -> Terms:
        """Return what the client may have of a request's terms; RequestError where it claims to be another."""
        tenant, limits = self.client.tenant, self.client.limits
        if asked.tenant not in ("", tenant):
            raise invalid("tenant", f"{echo(asked.tenant, repr)} is not the tenant of this API key, {tenant!r} is")
        return replace(asked, tenant=tenant, priority=min(asked.priority, limits.max_priority))


async def refuse(context: "grpc.aio.ServicerContext[_Request, _Response]", refused: Refused) -> Never:
    """End a call with what a refused client may plan with, as trailing metadata."""
    known = (("predicted-ttft-ms", refused.predicted_ttft_s), ("retry-after-ms", refused.retry_after_s))
    hints = [(name, f"{seconds * 1e3:.0f}") for name, seconds in known if seconds is not None]
    cause = () if refused.because is None else (("refused-because", refused.because.cause.value),)
    await abort(context, CODES[refused.status], refused.message, (*hints, *cause))


class RequireKey(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call, known method or not, without a client's key."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Request, _Response] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Request, _Response] | None":
        if handler_call_details.method.startswith(OPEN):
            return await continuation(handler_call_details)
        client = self._clients.look(handler_call_details.invocation_metadata)
        if not isinstance(client, str):
            return await continuation(handler_call_details)

        async def deny(messages: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
            del messages
            await self._clients.deny(client, context)

        # Streaming on both sides: such a handler answers before it has read anything.
        return grpc.stream_stream_rpc_method_handler(deny)
