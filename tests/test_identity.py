"""Internal ports serve who proves to know the secret, once for each proof, and the secret is never sent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from stream_ends import DECODE, SECRET, prefill_worker

from pdserve.base.clock import VirtualClock
from pdserve.kvtransfer.doors import ReceiverLost
from pdserve.net.rpc import (
    CHALLENGE_METADATA_KEY,
    HELLO_METADATA_KEY,
    HELLO_METHOD,
    PROOF_METADATA_KEY,
    Caller,
    RequireSecret,
    identify,
)
from pdserve.net.secret_proof import CHALLENGE_S, Challenges

SERVED, OTHER = "/test.Service/Served", "/test.Service/Other"
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


@dataclass
class Listener:
    port: int
    channel: grpc.aio.Channel
    denied: Counter[str] = field(default_factory=Counter)

    async def call(self, metadata: object, method: str = SERVED) -> grpc.StatusCode:
        return await self.channel.unary_unary(method)(b"", metadata=metadata).code()


async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    del context
    return request


class Serve(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_unary_rpc_method_handler(answer) if details.method in (SERVED, OTHER) else None


@asynccontextmanager
async def serving(*interceptors: grpc.aio.ServerInterceptor) -> AsyncIterator[tuple[grpc.aio.Channel, int]]:
    server = grpc.aio.server(interceptors=interceptors)
    server.add_generic_rpc_handlers((Serve(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, port
    finally:
        await server.stop(None)


@asynccontextmanager
async def listener(clock: VirtualClock | None = None) -> AsyncIterator[Listener]:
    denied: Counter[str] = Counter()
    async with serving(RequireSecret(SECRET, lambda: denied.update(["a call"]), clock)) as (channel, port):
        yield Listener(port, channel, denied)


async def test_a_proof_serves_one_call() -> None:
    async with listener() as there:
        proof = await identify(there.channel, SECRET, SERVED)
        assert await there.call(proof) is grpc.StatusCode.OK
        assert not there.denied
        assert await there.call(proof) is grpc.StatusCode.UNAUTHENTICATED
        assert there.denied == {"a call": 1}


async def test_a_proof_serves_the_process_that_asked_for_it_alone() -> None:
    async with listener() as there, listener() as another:
        proof = await identify(there.channel, SECRET, SERVED)
        assert await another.call(proof) is grpc.StatusCode.UNAUTHENTICATED
        assert await there.call(proof) is grpc.StatusCode.OK


async def test_a_proof_serves_its_method_alone() -> None:
    async with listener() as there:
        proof = await identify(there.channel, SECRET, SERVED)
        assert await there.call(proof, OTHER) is grpc.StatusCode.UNAUTHENTICATED
        assert await there.call(proof) is grpc.StatusCode.OK


async def test_a_proof_that_is_shown_too_late_serves_nothing() -> None:
    clock = VirtualClock(1000.0)
    async with listener(clock) as there:
        in_time, late = [await identify(there.channel, SECRET, SERVED) for _ in range(2)]
        clock.advance(CHALLENGE_S - 1)
        assert await there.call(in_time) is grpc.StatusCode.OK
        clock.advance(2)
        assert await there.call(late) is grpc.StatusCode.UNAUTHENTICATED


async def test_every_bit_of_a_proof_counts() -> None:
    async with listener() as there:
        ((key, proof),) = await identify(there.channel, SECRET, SERVED)
        for place in range(0, len(proof), 7):
            forged = bytearray(proof)
            forged[place] ^= 1
            assert await there.call(((key, bytes(forged)),)) is grpc.StatusCode.UNAUTHENTICATED
        assert await there.call(((key, proof + b"x"),)) is grpc.StatusCode.UNAUTHENTICATED
        assert await there.call(((key, proof),)) is grpc.StatusCode.OK


async def test_who_has_another_secret_is_denied_counted_and_given_no_challenge() -> None:
    async with listener() as there:
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await identify(there.channel, b"x" * 32, SERVED)
        assert denied.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert there.denied == {"a call": 1}
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await there.channel.unary_unary(HELLO_METHOD)(b"", metadata=Caller(b"x" * 32).hello)
        assert CHALLENGE_METADATA_KEY not in dict(denied.value.trailing_metadata())


class Impostor(grpc.aio.ServerInterceptor):
    """Listens without knowing the secret, and notes what callers show."""

    def __init__(self, challenge: bytes | None) -> None:
        self._challenge = challenge
        self.shown: dict[str, bytes] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        self.shown |= {k: v for k, v in handler_call_details.invocation_metadata if isinstance(v, bytes)}
        if self._challenge is None:
            return grpc.unary_unary_rpc_method_handler(answer)
        return grpc.stream_stream_rpc_method_handler(self._deny)

    async def _deny(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        del messages
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "", trailing_metadata=((CHALLENGE_METADATA_KEY, self._challenge),)
        )


@pytest.mark.parametrize("challenge", [None, b"", b"x" * 88])
async def test_who_listens_without_the_secret_is_shown_no_proof_and_told_nothing(challenge: bytes | None) -> None:
    impostor = Impostor(challenge)
    async with serving(impostor) as (_, port), prefill_worker() as prefill:
        prefill.client.connect(DECODE, f"127.0.0.1:{port}")
        async with asyncio.timeout(20):
            lost = await prefill.heard.next()
    assert isinstance(lost, ReceiverLost)
    assert "secret is not the same" in lost.reason
    assert impostor.shown.keys() == {HELLO_METADATA_KEY}


async def test_the_secret_is_shown_to_nobody() -> None:
    impostor = Impostor(None)
    async with serving(impostor) as (_, port), prefill_worker() as prefill:
        prefill.client.connect(DECODE, f"127.0.0.1:{port}")
        assert isinstance(await prefill.heard.next(), ReceiverLost)
    assert impostor.shown
    assert not any(SECRET in value for value in impostor.shown.values())


async def test_what_an_honest_caller_says_holds_the_secret_nowhere() -> None:
    async with listener() as there:
        ((key, proof),) = await identify(there.channel, SECRET, SERVED)
    assert key == PROOF_METADATA_KEY
    assert SECRET not in proof


def test_answered_challenges_are_remembered_for_as_long_as_they_could_be_answered() -> None:
    clock = VirtualClock()
    challenges = Challenges(clock)
    first = challenges.new()
    assert challenges.take(first)
    assert not challenges.take(first)
    clock.advance(CHALLENGE_S + 2)
    assert not challenges.take(first)
    assert not challenges._spent  # what cannot be answered any more takes no memory
    assert challenges.take(challenges.new())
