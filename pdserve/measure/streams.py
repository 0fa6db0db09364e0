"""Connections of `bench frontend`, one for each API: they look at answers only to see that they are whole."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import grpc

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.net.rpc import split_address
from pdserve.proto.v1 import inference_pb2 as inference

_POST = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_GENERATE = "/pdserve.v1.InferenceService/Generate"


class Api(StrEnum):
    """A way to ask for a streamed answer."""

    GRPC = "grpc"
    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Answered:
    """What a stream saw of one request."""

    ttft_s: float
    num_messages: int


class Stream(Protocol):
    """One connection that sends a request after another."""

    async def ask(self, prompt: str, max_tokens: int) -> Answered:
        """Send a request and read its answer whole; CommandError where it is not as long as it should be."""

    async def close(self) -> None: ...


def open_stream(api: Api, model: str, grpc_address: str, http_address: str) -> Stream:
    """Return a stream that connects with its first request and asks the named model."""
    return GrpcStream(grpc_address) if api is Api.GRPC else HttpStream(http_address, FORMS[api], model)


class GrpcStream:
    """A client of InferenceService that parses the last message of an answer alone."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_GENERATE)
        self._clock = MonotonicClock()

    async def ask(self, prompt: str, max_tokens: int) -> Answered:
        sampling = inference.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = inference.GenerateRequest(text=prompt, sampling=sampling)
        sent_s, first_s, num_messages, last = self._clock.now_s(), 0.0, 0, b""
        call = self._generate(request.SerializeToString(), wait_for_ready=True)
        while isinstance(message := await call.read(), bytes):
            first_s = first_s or self._clock.now_s()
            num_messages, last = num_messages + 1, message
        num_tokens = inference.GenerateResponse.FromString(last).usage.completion_tokens
        if num_tokens != max_tokens:
            raise CommandError(f"an answer has {num_tokens} tokens, {max_tokens} were asked for")
        return Answered(first_s - sent_s, num_messages)

    async def close(self) -> None:
        await self._channel.close()


@dataclass(frozen=True, slots=True)
class HttpForm:
    """How an API of HTTP is asked, and what its events hold."""

    path: bytes
    body: Callable[[str, int], Mapping[str, object]]  # of a prompt and the tokens of its answer
    text: bytes  # in the first event that has text, and in none before
    usage: bytes  # with the tokens of an answer, in its last events


def _completion(prompt: str, max_tokens: int) -> Mapping[str, object]:
    usage = {"include_usage": True}
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream_options": usage}


def _chat(prompt: str, max_tokens: int) -> Mapping[str, object]:
    messages = [{"role": "user", "content": prompt}]
    usage = {"include_usage": True}
    return {"messages": messages, "max_tokens": max_tokens, "stream_options": usage}


def _response(prompt: str, max_tokens: int) -> Mapping[str, object]:
    return {"input": prompt, "max_output_tokens": max_tokens, "store": False}


def _message(prompt: str, max_tokens: int) -> Mapping[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": max_tokens}


FORMS = {
    Api.COMPLETIONS: HttpForm(b"/v1/completions", _completion, b'"text":"', b'"completion_tokens":%d,'),
    Api.CHAT: HttpForm(b"/v1/chat/completions", _chat, b'"delta":{"content":"', b'"completion_tokens":%d,'),
    Api.RESPONSES: HttpForm(b"/v1/responses", _response, b'"delta":"', b'"output_tokens":%d,'),
    Api.MESSAGES: HttpForm(b"/v1/messages", _message, b'"text_delta"', b'"output_tokens":%d'),
}


class HttpStream(asyncio.Protocol):
    """A client of one of HTTP's APIs that looks at an answer's events no further than to count them."""

    def __init__(self, address: str, form: HttpForm, model: str) -> None:
        self._address = address
        self._form = form
        self._always = {"model": model, "temperature": 1.0, "stream": True}
        self._clock = MonotonicClock()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._first_s = 0.0
        self._whole: asyncio.Future[None] | None = None

    async def ask(self, prompt: str, max_tokens: int) -> Answered:
        loop, form = asyncio.get_running_loop(), self._form
        if self._transport is None:
            host, port = split_address(self._address)
            self._transport, _ = await loop.create_connection(lambda: self, host, int(port))
        if self._transport.is_closing():
            raise CommandError("the router closed a connection between two requests")
        packed = json.dumps({**self._always, **form.body(prompt, max_tokens)}).encode()
        self._received.clear()
        self._first_s = 0.0
        self._whole = loop.create_future()
        sent_s = self._clock.now_s()
        self._transport.write(_POST % (form.path, len(packed), packed))
        await self._whole
        if form.usage % max_tokens not in self._received:
            raise CommandError(f"an answer is not of {max_tokens} tokens: {bytes(self._received[-1000:])!r}")
        return Answered(self._first_s - sent_s, self._received.count(b"data: {"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._first_s and self._form.text in self._received:
            self._first_s = self._clock.now_s()
        is_error = self._received.startswith(b"HTTP/1.1") and not self._received.startswith(b"HTTP/1.1 200")
        if self._whole is not None and (is_error or self._received.endswith(_LAST_CHUNK)):
            self._whole.set_result(None)
            self._whole = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._whole is not None:
            self._whole.set_exception(exc or CommandError("the router closed a connection"))

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
