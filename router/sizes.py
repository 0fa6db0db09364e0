"""Refuses messages over the public port's limit in the endpoint's own words.

gRPC by itself answers RESOURCE_EXHAUSTED, which clients take for a reason to try again. It still does so beyond
HARD_LIMIT_BYTES, before it has the whole message in memory.
"""

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.rpc import PUBLIC_MESSAGE_BYTES, abort

HARD_LIMIT_BYTES = 4 * PUBLIC_MESSAGE_BYTES

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class LimitSizes(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to a server-streaming call whose request is over the limit, or is none."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[_Request, _Response] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Request, _Response] | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_stream is None or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer
        serve = cast("Callable[[_Request, _Context], Awaitable[None]]", handler.unary_stream)  # grpc.aio's kind

        async def check(raw: bytes, context: _Context) -> None:
            if len(raw) > PUBLIC_MESSAGE_BYTES:
                text = f"message: {len(raw)} bytes are over the limit of {PUBLIC_MESSAGE_BYTES}"
                await abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
            try:
                request = parse(raw)
            except DecodeError as error:
                await abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"message: {error}")
            await serve(request, context)

        return grpc.unary_stream_rpc_method_handler(check, response_serializer=handler.response_serializer)
