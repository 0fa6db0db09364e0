"""Who may speak over ZMQ: on one machine anybody, beyond it who knows the cluster's secret.

CURVE asks for key pairs; a cluster has two, publishers' and subscribers', and both are derived from its secret.
"""

import hmac
from dataclasses import dataclass
from typing import TypeAlias

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from pdserve.errors import ConfigError
from pdserve.rpc import check_bind

AnySocket: TypeAlias = "zmq.Socket[bytes] | zmq.asyncio.Socket"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The secret halves of a cluster's two key pairs, as ZMQ writes them."""

    publisher: bytes
    subscriber: bytes

    @classmethod
    def of(cls, secret: bytes) -> "CurveKeys":
        """Derive them from the cluster's secret."""
        publisher, subscriber = (hmac.digest(secret, b"kv events " + who, "sha256") for who in (b"out", b"in"))
        return cls(z85.encode(publisher), z85.encode(subscriber))

    def guard(self, socket: AnySocket) -> None:
        """Let a publisher's socket ask subscribers for their key."""
        socket.curve_server = True
        socket.curve_secretkey = self.publisher
        socket.curve_publickey = zmq.curve_public(self.publisher)

    def show(self, socket: AnySocket) -> None:
        """Let a subscriber's socket prove who it is, and know the publisher."""
        socket.curve_serverkey = zmq.curve_public(self.publisher)
        socket.curve_secretkey = self.subscriber
        socket.curve_publickey = zmq.curve_public(self.subscriber)

    def authenticator(self, context: zmq.asyncio.Context) -> AsyncioAuthenticator:
        """Start what lets subscribers in to this context's guarded sockets: those with the cluster's key."""
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", _OneKey(zmq.curve_public(self.subscriber)))
        return authenticator


class _OneKey:
    """Knows one public key, as ZMQ writes it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return hmac.compare_digest(key, self._key)


def is_local(endpoint: str) -> bool:
    """Return whether an endpoint cannot be reached from other machines."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return True
    try:
        check_bind(address, has_identity=False)
    except ConfigError:
        return False
    return True
