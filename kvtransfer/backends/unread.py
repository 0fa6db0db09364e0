"""Waits until what others have sent to this process can reach none of its pages any more.

A process that has ended writes no more, but over TCP what it had written may still wait in a socket here: a page it
was meant for is not safe before that has been read too. (Seen: 4 MiB, landing up to 20 ms after the receiver thawed.)
Nor is it while a mover holds what it has read, and has yet to copy it into the page.
"""

import asyncio

from pdserve.kvtransfer.backends.tcp_flows import flow, flows
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.session import Peer

LOOK_AGAIN_S = 0.002  # no event tells that somebody else has read a socket


async def settle(mover: Mover, ended: Peer) -> None:
    """Return when nothing that an ended process has sent can reach a page here any more."""
    # Cut first: a mover may read no further from the sockets of a writer whose machine has gone silently.
    await asyncio.to_thread(mover.cut, ended)
    await until_read()


async def until_read() -> None:
    """Return when all that has reached this process's TCP sockets by now has been read; at once where none can tell."""
    waiting = {number: each.received for number, each in flows().items() if each.num_unread}
    while waiting:
        await asyncio.sleep(LOOK_AGAIN_S)
        waiting = {number: mark for number, mark in waiting.items() if flow(number).is_before(mark)}
