"""Messages that wait for a stream are written as one: each write costs both ends more than what it carries."""

import asyncio
from collections.abc import MutableSequence
from typing import Protocol, Self, TypeVar

TOGETHER_BYTES = 262_144  # from which on no more messages are written together; not tuned


class Message(Protocol):
    """A message of a stream. `more` are those that follow it, which have none themselves."""

    @property
    def more(self) -> MutableSequence[Self]: ...
    def ByteSize(self) -> int: ...  # noqa: N802 - protobuf's


M = TypeVar("M", bound=Message)


async def next_message(outbound: "asyncio.Queue[M | None]") -> M | None:
    """Wait for a message; return it with those that wait behind it, up to a size. None is the last in a queue.

    The message is changed, so it must be in no other queue.
    """
    message = await outbound.get()
    if message is None:
        return None
    num_bytes = 0 if outbound.empty() else message.ByteSize()
    while num_bytes < TOGETHER_BYTES and not outbound.empty():
        another = outbound.get_nowait()
        if another is None:
            outbound.put_nowait(None)
            break
        num_bytes += another.ByteSize()
        message.more.append(another)
    return message
