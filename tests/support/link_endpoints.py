"""Endpoints to which workers attach, on this machine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pdserve.net.rpc import INTERNAL_MESSAGE_BYTES, RequireSecret, server_options
from pdserve.proto.v1.link_pb2_grpc import LinkServiceServicer, add_LinkServiceServicer_to_server

SECRET = b"s" * 32


@asynccontextmanager
async def listening(endpoint: LinkServiceServicer, port: int = 0) -> AsyncIterator[str]:
    """Yield its address. port: 0 for any."""
    server = grpc.aio.server(interceptors=[RequireSecret(SECRET)], options=server_options(INTERNAL_MESSAGE_BYTES))
    add_LinkServiceServicer_to_server(endpoint, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert port in (0, bound)
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)
