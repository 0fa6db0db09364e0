"""How processes of a cluster authenticate to each other: with the shared secret, and with certificates.

With certificates all internal connections are mutual TLS, and each end checks the other's part. Files that change are
read again: a listener takes them for its next connection, a caller each time it dials. Open connections stay as they
are.
"""

import inspect
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Self, TypeAlias, TypeVar, cast

import grpc

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.errors import ConfigError, PeerFault, echo
from pdserve.base.watched_files import Watched
from pdserve.net import rpc
from pdserve.net.certificates import IDENTITY_FILES, Identity, KeyPair, Part, may_call, read_identity, read_pair

logger = logging.getLogger(__name__)

PORT_KEPT_S = 60.0  # TIME_WAIT: the port of a closed connection is not reused for so long
PEER_KEY = "peer_spiffe_id"  # where gRPC puts the one URI of a caller's certificate

_Content = TypeVar("_Content")
_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_Serve = Callable[[object, _Context], Awaitable[object] | AsyncIterator[object]]


class Connections:
    """Counts connections to a port with TLS: all of them, and those that made a call.

    gRPC does not report failed handshakes to Python. It does ask for certificates before each handshake, and a call
    shows that its handshake succeeded. A connection is known only by the address and port of its other end, and a
    client reuses a port some time after it has closed a connection.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.num_opened = 0
        self.num_called = 0
        self._clock = clock or MonotonicClock()
        self._callers: OrderedDict[str, float] = OrderedDict()  # time of each caller's last call, the latest last
        self._silent: deque[float] = deque(maxlen=rpc.MAX_CONNECTIONS)  # when connections without a call began

    def note_opened(self) -> None:
        """Count a handshake that begins. gRPC's threads call this, one at a time."""
        self.num_opened += 1
        self._silent.append(self._clock.now_s())

    def note_call(self, peer: str) -> None:
        """Count a call. `peer`: address and port of the connection's other end."""
        now_s, called_s = self._clock.now_s(), self._callers.pop(peer, None)
        self._callers[peer] = now_s
        if called_s is not None and now_s - called_s < PORT_KEPT_S:
            return
        while self._silent and self._silent[0] < now_s - rpc.HANDSHAKE_TIMEOUT_S:
            self._silent.popleft()
        if called_s is not None and not self._silent:
            return  # no later connection is open without a call, so this is the same one
        self.num_called += 1
        if self._silent:
            self._silent.popleft()
        if len(self._callers) > rpc.MAX_CONNECTIONS:
            self._callers.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process needs to listen and dial inside its cluster."""

    secret: bytes
    identity: Watched[Identity] | None = None  # None: plain gRPC
    connections: Connections = field(default_factory=Connections)  # to the internal port, if it has TLS

    @classmethod
    def read(cls, secret_file: Path, identity_dir: Path | None, part: Part) -> Self:
        """Read them; ConfigError names the setting that is refused."""
        secret = rpc.read_secret(secret_file)
        if identity_dir is None:
            return cls(secret)
        paths = tuple(identity_dir / name for name in IDENTITY_FILES)
        return cls(secret, Watched(paths, partial(_identity_of, part, identity_dir)))

    def channel(self, address: str, listener: Part) -> grpc.aio.Channel:
        """Dial the internal port, host:port, of a process with that part."""
        options: list[tuple[str, int | str]] = [*rpc.channel_options(rpc.INTERNAL_MESSAGE_BYTES)]
        if self.identity is None:
            return grpc.aio.insecure_channel(address, options=options)
        identity = self.identity.look()
        if identity.pair.expires < datetime.now(UTC):
            _warn(identity.pair.expires)
        shown = grpc.ssl_channel_credentials(identity.authority, identity.pair.key, identity.pair.certificate)
        options.append(("grpc.ssl_target_name_override", listener.host))
        return grpc.aio.secure_channel(address, shown, options=options)

    def server(self, on_denied: Callable[[PeerFault], None]) -> grpc.aio.Server:
        """Return a server for an internal port; `on_denied` is called for each call that is denied."""
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if self.identity is not None:
            interceptors.append(NoteCallers(self.connections))
            interceptors.append(RequirePart(self.identity, partial(on_denied, PeerFault.PART)))
        interceptors.append(rpc.RequireSecret(self.secret, partial(on_denied, PeerFault.SECRET)))
        return grpc.aio.server(interceptors=interceptors, options=rpc.server_options(rpc.INTERNAL_MESSAGE_BYTES))

    def listen(self, server: grpc.aio.Server, host: str, port: int, key: str) -> str:
        """Bind an internal port (0: a free one) and return its address; ConfigError names `key` where it cannot be."""
        if self.identity is None:
            return rpc.listen(server, host, port, key)

        def configure(own: Identity) -> grpc.ServerCertificateConfiguration:
            return _configuration(own.pair, own.authority)

        both = _rotating(self.identity, configure, self.connections, asks_for_certificates=True)
        return rpc.listen(server, host, port, key, both)

    def ports(self, name: str) -> dict[str, Connections]:
        """Return the counter of connections to the internal port, by the port's name; empty without TLS."""
        return {} if self.identity is None else {name: self.connections}


@cache
def _warn(expired: datetime) -> None:
    """Log once that our certificate has expired: listeners end the connection without saying why."""
    logger.error("identity_dir: the certificate ended at %s; all that this process dials refuses it", expired)


def public_credentials(certificate: Path, key: Path, connections: Connections) -> grpc.ServerCredentials:
    """Return a public port's credentials; clients need no certificate. `connections` counts their connections."""
    pair = Watched((certificate, key), lambda: read_pair(certificate, key, ("ssl_certfile", "ssl_keyfile")))
    return _rotating(pair, _configuration, connections, asks_for_certificates=False)


def _rotating(
    files: Watched[_Content],
    configure: Callable[[_Content], grpc.ServerCertificateConfiguration],
    connections: Connections,
    *,
    asks_for_certificates: bool,
) -> grpc.ServerCredentials:
    """Return a listener's credentials. Their files are checked for changes at each connection."""
    shown = files.look()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return a changed certificate, else None. gRPC calls this in a thread before each handshake."""
        nonlocal shown
        connections.note_opened()
        content = files.look()
        if content is shown:
            return None
        shown = content
        return configure(content)

    # The stub does not allow a fetcher that returns None, which means that nothing has changed.
    return grpc.dynamic_ssl_server_credentials(configure(shown), fetch, asks_for_certificates)  # type: ignore[arg-type]


def _configuration(pair: KeyPair, authority: bytes | None = None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], authority)


def _identity_of(part: Part, folder: Path) -> Identity:
    identity = read_identity(folder)
    if identity.part is not part:
        raise ConfigError(f"identity_dir: {folder} is of a {identity.part}, a {part}'s is needed")
    return identity


async def _serve_nothing(messages: object, context: rpc.AnyContext) -> None:
    del messages
    await rpc.abort(context, grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")


def _preceded(handler: rpc.Handler, come_first: Callable[[_Context], Awaitable[None]]) -> rpc.Handler:
    """Return a handler that runs another function first, which may end the call. Unknown methods get one, too."""
    if handler is None:
        handler = grpc.stream_stream_rpc_method_handler(_serve_nothing)
    kind = "_".join("stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming))
    serve = cast("_Serve", getattr(handler, kind))

    async def serve_after(request: object, context: _Context) -> object:
        await come_first(context)
        served = serve(request, context)
        if inspect.isawaitable(served):
            return await served
        async for reply in served:
            await context.write(reply)
        return None

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    made: rpc.Handler = make(serve_after, handler.request_deserializer, handler.response_serializer)
    return made


class NoteCallers(grpc.aio.ServerInterceptor):
    """Counts each call in `Connections`. This interceptor comes first, so that denied calls count too."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def intercept_service(
        self, continuation: rpc.Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> rpc.Handler:
        return _preceded(await continuation(handler_call_details), self._note)

    async def _note(self, context: _Context) -> None:
        self._connections.note_call(context.peer())


class RequirePart(grpc.aio.ServerInterceptor):
    """Answers PERMISSION_DENIED to every call, of a known method or not, whose caller has the wrong part."""

    def __init__(self, identity: Watched[Identity], on_denied: Callable[[], None]) -> None:
        self._identity = identity
        self._on_denied = on_denied

    async def intercept_service(
        self, continuation: rpc.Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> rpc.Handler:
        handler = await continuation(handler_call_details)
        return _preceded(handler, partial(self._check, handler_call_details.method))

    async def _check(self, method: str, context: _Context) -> None:
        uri = b"".join(context.auth_context().get(PEER_KEY, ())).decode(errors="replace")
        part = self._identity.look().part_of(uri)
        if not may_call(part, method):
            self._on_denied()
            who = f"{part}s" if part else f"certificates of {echo(uri, repr)}"
            await rpc.abort(context, grpc.StatusCode.PERMISSION_DENIED, f"{who} may not call {echo(method)}")
