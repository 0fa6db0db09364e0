"""Carries the bytes of a rank's sockets between two machines, at either end.

Invariant: the end of a socket at one end is its end at the other, behind all bytes that came before it. What a socket
does not take is not read from the network, so nothing is queued without a bound.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from pdserve.base.errors import ConfigError
from pdserve.kvtransfer.server import EVERYWHERE
from pdserve.net.rpc import check_bind
from pdserve.proto.v1 import nodes_pb2 as wire

CHUNK_BYTES = 1 << 18
BEAT_S, SILENT_S = 1.0, 15.0  # between two beats of a machine; without one, after which it counts as ended
SOCKETS = (wire.RANK_SOCKET_STEPS, wire.RANK_SOCKET_ORDERS)


async def carry(
    connected: socket.socket,
    incoming: AsyncIterator[bytes],
    send: Callable[[bytes], Awaitable[object]],
    finish: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Carry bytes both ways until the other machine ends the stream, and close the socket.

    finish: says that nothing follows; what still comes is waited for. None: the end of the socket ends the stream.
    """
    reader, writer = await asyncio.open_connection(sock=connected)

    async def take_in() -> None:
        async for content in incoming:
            writer.write(content)
            with suppress(OSError):  # its process has ended, as the other direction finds out
                await writer.drain()

    async def pass_on() -> None:
        with suppress(OSError):
            while content := await reader.read(CHUNK_BYTES):
                await send(content)

    taking, passing = asyncio.create_task(take_in()), asyncio.create_task(pass_on())
    try:
        done, _ = await asyncio.wait((taking, passing), return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        if finish is not None and not taking.done():
            await finish()
            await taking
    finally:
        taking.cancel()
        passing.cancel()
        writer.close()


def check_interface(handoff_host: str, *, has_identity: bool) -> None:
    """Raise ConfigError unless ranks of several machines may meet on an address."""
    if handoff_host in EVERYWHERE:
        raise ConfigError(f"handoff_host: {handoff_host!r} names no interface, and sums of several machines need one")
    remedy = "several machines of a worker need identity_dir"
    check_bind(handoff_host, has_identity=has_identity, key="handoff_host", remedy=remedy)
