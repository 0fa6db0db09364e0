"""How pdserve's processes listen, dial and recognise each other over gRPC.

An internal port serves a call only if its metadata prove that the caller knows the cluster's shared secret. Every other
call is denied, whatever its method. The secret itself is never sent:

    caller                                            listener
    any call with      hello: its nonce, a proof  ─▶
                                                  ◀─  UNAUTHENTICATED with
                                                      challenge: one of its own, a proof over both
    the call with      proof: over both, method   ─▶  served, once
"""

import errno
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never, TypeAlias

import grpc

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.errors import ConfigError
from pdserve.base.files import read_private
from pdserve.net.secret_proof import CHALLENGE_BYTES, NONCE_BYTES, Challenges, is_proof, new_nonce, proof_of

PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_CONNECTIONS = 4096  # of a listener, including handshakes
HANDSHAKE_TIMEOUT_S = 10.0
LAST_WORDS_S = 1.0  # for replies and statuses that are being sent when a server stops
MAX_STATUS_BYTES = 2000  # of a status message; up to 3 times as long on the wire, and clients take 8 kB of headers
DISMISSED_STATUS = grpc.StatusCode.ABORTED  # of a worker's link: a router refuses the process, which must end
HELLO_METADATA_KEY = "pdserve-hello-bin"
CHALLENGE_METADATA_KEY = "pdserve-challenge-bin"
PROOF_METADATA_KEY = "pdserve-proof-bin"
HELLO_METHOD = "/pdserve.v1.Identity/Hello"  # nobody serves it: a hello is always denied
MIN_SECRET_BYTES = 32

Options = list[tuple[str, int]]
Metadata = tuple[tuple[str, bytes], ...]
AnyContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]  # of an interceptor

_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # else a peer that is frozen has 60 s to answer
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_message_limits(max_message_bytes),
        *_KEEPALIVE,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # also how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(max_message_bytes: int, *, shares_port: bool = False) -> Options:
    """Return the options of a server.

    A peer that pings often is never cut off: with gRPC's default, two strikes, a long decode without messages would end
    every call on the connection. Unless `shares_port`, a port that another process listens on is an error.
    """
    return [
        *_message_limits(max_message_bytes),
        *_KEEPALIVE,
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1e3)),  # of TLS and HTTP/2 together
        ("grpc.so_reuseport", int(shares_port)),
    ]


def _message_limits(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def read_secret(path: Path) -> bytes:
    """Return the cluster's shared secret; ConfigError unless the file is private and long enough."""
    secret = read_private(path, "secret_file").strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"secret_file: {path} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed")
    return secret


def check_bind(address: str, *, has_identity: bool, key: str = "host", remedy: str = "") -> None:
    """Raise ConfigError if a listener that does not identify its callers could be reached from other machines.

    `address` is a host or host:port. The error names the option `key`, and `remedy`, which says what to set.
    """
    if not has_identity and not is_loopback(address):
        text = f"{key}: {address} is reachable from other machines and callers would not be identified"
        raise ConfigError(f"{text}; {remedy}" if remedy else text)


def listen(
    server: grpc.aio.Server, host: str, port: int, key: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Bind a port (0: a free one) and return its address, host:port; ConfigError names `key` where that cannot be.

    With credentials the port speaks TLS only.
    """
    address = join_address(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:  # without a number
        raise ConfigError(f"{key}: cannot listen on {address}: {why_not_bound(host, port)}") from error
    return join_address(host, bound)


def bind_error(host: str, port: int) -> OSError | None:
    """Try to bind a host's addresses; return why one of them cannot be, None if all can."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None


def why_not_bound(host: str, port: int, error: OSError | None = None) -> str:
    """Return why a port cannot be bound, and what helps; without an error, it is looked for now."""
    error = error or bind_error(host, port)
    if isinstance(error, socket.gaierror):
        return f"the host is not known here ({error.strerror}); give a name or address of this machine"
    match None if error is None else error.errno:
        case errno.EADDRNOTAVAIL:
            return "that is no address of this machine; give one of its own, or 0.0.0.0 for all"
        case errno.EACCES | errno.EPERM:
            return f"this user may not listen on port {port} ({os.strerror(errno.EACCES)}); take one from 1024 on"
        case errno.EADDRINUSE:
            return "the port is in use; end what listens there, or take another port (0: a free one)"
        case errno.EAFNOSUPPORT:
            return "this machine has no addresses of that kind (IPv4 or IPv6)"
        case _:
            return "no reason is known" if error is None else error.strerror or str(error)


@asynccontextmanager
async def running(server: grpc.aio.Server, grace_s: float | None = None) -> AsyncIterator[None]:
    """Run a server for the length of the block. Then calls may go on for `grace_s`; None: they end at once."""
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace_s)


def bare_host(host: str) -> str:
    """Return a host without the brackets in which an IPv6 address may be given."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_address(host: str, port: int) -> str:
    """Return host:port, an IPv6 address in brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether a host or host:port can be reached from this machine alone."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def split_address(address: str) -> tuple[str, str]:
    """Return the host, without brackets, and the port of a host or host:port; a port that is not there is empty."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    host, port = address.split(":") if address.count(":") == 1 else (address, "")
    return host, port


async def abort(
    context: AnyContext,
    code: grpc.StatusCode,
    message: str,
    trailing: tuple[tuple[str, str], ...] = (),
) -> Never:
    """End a call with a status. The message is cut: clients would drop one that is too long."""
    whole = message.encode(errors="replace")
    if len(whole) > MAX_STATUS_BYTES:
        message = whole[: MAX_STATUS_BYTES - 3].decode(errors="ignore") + "..."
    await context.abort(code, message, trailing_metadata=trailing)


class Caller:
    """The caller's end of the exchange: proves that it knows the secret, and checks the listener's proof."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = new_nonce()

    @property
    def hello(self) -> Metadata:
        """Return the metadata of a call that asks for a challenge."""
        return ((HELLO_METADATA_KEY, self._nonce + proof_of(self._secret, "hello", self._nonce)),)

    def answer(self, denied: grpc.aio.AioRpcError | grpc.Call, method: str) -> Metadata | None:
        """Return the metadata of one call of a method; None unless the listener has proved that it knows the secret."""
        challenge, proof = _split(_value_of(CHALLENGE_METADATA_KEY, denied.trailing_metadata()), CHALLENGE_BYTES)
        if not is_proof(proof, self._secret, "listener", self._nonce, challenge):
            return None
        answer = proof_of(self._secret, "caller", self._nonce, challenge, method.encode())
        return ((PROOF_METADATA_KEY, self._nonce + challenge + answer),)


async def identify(
    channel: grpc.aio.Channel,
    secret: bytes,
    method: str,
    timeout_s: float | None = None,
    *,
    wait_for_ready: bool = False,
) -> Metadata:
    """Return the metadata that one call of a method, /package.service/name, to an internal port must carry.

    Takes a round trip to the listener. Raises grpc.aio.AioRpcError if that fails, or the listener does not know the
    secret.
    """
    caller = Caller(secret)
    say_hello: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HELLO_METHOD)
    call = say_hello(b"", metadata=caller.hello, timeout=timeout_s, wait_for_ready=wait_for_ready)
    try:
        await call
    except grpc.aio.AioRpcError as denied:
        proof = caller.answer(denied, method)
        if proof is not None:
            return proof
        if denied.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
    text = "the cluster's shared secret is not the same at both ends"
    raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


class RequireSecret(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call, of a known method or not, that does not prove knowledge of the secret.

    A caller whose hello proves that it knows the secret gets a challenge with the denial.
    """

    def __init__(self, secret: bytes, on_denied: Callable[[], None] = lambda: None, clock: Clock | None = None) -> None:
        """`on_denied` is called for each denied call except those that ask for a challenge."""
        self._secret = secret
        self._on_denied = on_denied
        self._challenges = Challenges(clock or MonotonicClock())

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        metadata = handler_call_details.invocation_metadata
        if self._is_proved(_value_of(PROOF_METADATA_KEY, metadata), handler_call_details.method):
            return await continuation(handler_call_details)
        challenge = self._challenge(_value_of(HELLO_METADATA_KEY, metadata))
        if not challenge:
            self._on_denied()
        # Streaming on both sides: such a handler answers before it has read anything.
        return grpc.stream_stream_rpc_method_handler(partial(_deny, challenge))

    def _is_proved(self, shown: bytes, method: str) -> bool:
        nonce, rest = _split(shown, NONCE_BYTES)
        challenge, proof = _split(rest, CHALLENGE_BYTES)
        is_proved = is_proof(proof, self._secret, "caller", nonce, challenge, method.encode())
        return is_proved and self._challenges.take(challenge)

    def _challenge(self, hello: bytes) -> Metadata:
        """Return what goes with the denial of a call: nothing, unless its hello proves knowledge of the secret."""
        nonce, proof = _split(hello, NONCE_BYTES)
        if not is_proof(proof, self._secret, "hello", nonce):
            return ()
        challenge = self._challenges.new()
        return ((CHALLENGE_METADATA_KEY, challenge + proof_of(self._secret, "listener", nonce, challenge)),)


def _value_of(key: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """Return the value of a binary key, empty where there is none."""
    values = (value for name, value in metadata or () if name == key and isinstance(value, bytes))
    return next(values, b"")


def _split(value: bytes, num_bytes: int) -> tuple[bytes, bytes]:
    return value[:num_bytes], value[num_bytes:]


async def _deny(
    challenge: Metadata, _: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
) -> None:
    text = "the cluster's shared secret has not been proved"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, text, trailing_metadata=challenge)
