"""The identification of `pdserve.net.rpc` for gRPC's threads, which tests of whole processes use."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from pdserve.net.rpc import (
    CHALLENGE_METADATA_KEY,
    HELLO_METADATA_KEY,
    HELLO_METHOD,
    PROOF_METADATA_KEY,
    Caller,
    Metadata,
    read_secret,
)
from pdserve.net.secret_proof import CHALLENGE_BYTES, NONCE_BYTES, proof_of


def operators_proof(channel: grpc.Channel, secret_file: Path, method: str, timeout_s: float = 10) -> Metadata:
    """Return the metadata of one call of an operator's; waits for a router."""
    return proof_for(channel, secret_file, f"/pdserve.v1.AdminService/{method}", timeout_s)


def proof_for(channel: grpc.Channel, secret_file: Path, method: str, timeout_s: float = 10) -> Metadata:
    """Return the metadata of one call of a method, /package.service/name; waits for a listener."""
    caller, say_hello = Caller(read_secret(secret_file)), channel.unary_unary(HELLO_METHOD)
    try:
        say_hello(b"", metadata=caller.hello, timeout=timeout_s, wait_for_ready=True)
    except grpc.RpcError as denied:
        proof = caller.answer(denied, method)
        if proof is None:
            raise
        return proof
    raise AssertionError("a call without a proof was answered")


class KnowSecret(grpc.ServerInterceptor):
    """Proves to callers that this end knows the secret, and believes what they show."""

    def __init__(self, secret_file: Path) -> None:
        """The file is read when somebody calls."""
        self._secret_file = secret_file

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        told = dict(handler_call_details.invocation_metadata)
        if PROOF_METADATA_KEY in told:
            return continuation(handler_call_details)
        nonce, challenge = told[HELLO_METADATA_KEY][:NONCE_BYTES], bytes(CHALLENGE_BYTES)
        shown = challenge + proof_of(read_secret(self._secret_file), "listener", nonce, challenge)

        def deny(requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
            del requests
            context.set_trailing_metadata(((CHALLENGE_METADATA_KEY, shown),))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "")

        return grpc.stream_stream_rpc_method_handler(deny)
