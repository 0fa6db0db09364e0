"""Writes messages that wait for a stream as one message: a write costs both ends more than its content."""

from asyncio import InvalidStateError, Queue
from collections.abc import Callable, MutableSequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import grpc

TOGETHER_BYTES = 262_144  # a message of this size is not extended; not tuned


class Message(Protocol):
    """A message of a stream. `more` has the messages that follow it; these have no `more` themselves."""

    @property
    def more(self) -> MutableSequence[Self]: ...
    def ByteSize(self) -> int: ...  # noqa: N802 - protobuf's
    def CopyFrom(self, other: Self) -> None: ...  # noqa: N802


M = TypeVar("M", bound=Message)
Deferred: TypeAlias = Callable[[], M | None]  # makes the message when its turn comes; None: no message


async def next_message(outbound: "Queue[M | None] | Queue[M | Deferred[M] | None]") -> M | None:
    """Wait for a message; return it with those that wait behind it, up to a size. A None ends the queue.

    Queued messages are not changed: the same object may be in another queue.
    """
    first: M | None = None
    while first is None:
        entry = await outbound.get()
        if entry is None:
            return None
        first = _made(entry)
    if outbound.empty():
        return first
    together, num_bytes = type(first)(), first.ByteSize()
    together.CopyFrom(first)
    while num_bytes < TOGETHER_BYTES and not outbound.empty():
        entry = outbound.get_nowait()
        if entry is None:
            outbound.put_nowait(None)
            break
        another = _made(entry)
        if another is not None:
            num_bytes += another.ByteSize()
            together.more.append(another)
    return together


async def write_all(
    outbound: "Queue[M | None] | Queue[M | Deferred[M] | None]", call: "grpc.aio.StreamStreamCall[M, Any]"
) -> None:
    """Write to a stream that this process has opened, until there is None in the queue or the stream has ended."""
    try:
        while (message := await next_message(outbound)) is not None:
            await call.write(message)
        await call.done_writing()
    except (grpc.RpcError, InvalidStateError):
        pass  # the reader sees the same end and says why


def _made(entry: M | Deferred[M]) -> M | None:
    return entry() if callable(entry) else entry
