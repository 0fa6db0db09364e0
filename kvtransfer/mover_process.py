"""Drives a rank's mover, in the rank's process, as rank 0 orders over a socket.

Invariant: each copy and each call of rank 0 is answered once; copies of one hand-off in the order in which they came.
Where rank 0 has ended, this process ends: what it still writes would outlive the worker.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import assert_never

import msgspec

from pdserve.base.errors import ConfigError, InvariantError, ProtocolError
from pdserve.base.ids import Peer
from pdserve.kvtransfer import remote_orders as orders
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.net.frames import next_frame, packed

NewMover = Callable[[Peer, OnStopped], Mover]


async def serve(connected: socket.socket, new_mover: NewMover, on_lost: Callable[[], object]) -> None:
    """Carry out orders until rank 0 closes the mover. on_lost: called at once if it ends before that."""
    reader, writer = await asyncio.open_connection(sock=connected)
    decoder = msgspec.msgpack.Decoder(orders.Order)
    try:
        async with asyncio.TaskGroup() as tasks:
            driver = _Driver(writer, new_mover)
            order: orders.Order | None = None
            while not isinstance(order, orders.Close):
                try:
                    order = decoder.decode(await next_frame(reader))
                except (EOFError, OSError):
                    on_lost()
                    raise
                tasks.create_task(driver.carry_out(order))  # they begin in the order in which they were created
        writer.close()
        await writer.wait_closed()  # the last answer has left
    finally:
        writer.close()


class _Driver:
    def __init__(self, writer: asyncio.StreamWriter, new_mover: NewMover) -> None:
        self._writer, self._new_mover = writer, new_mover
        self._loop = asyncio.get_running_loop()
        self._mover: Mover | None = None

    async def carry_out(self, order: orders.Order) -> None:
        """Reach the mover before the first wait, so that it has each order before those that came later."""
        if isinstance(order, orders.Call):
            await self._answer(order)
        else:
            self._obey(order)

    def _obey(self, order: orders.Write | orders.Cancel | orders.Forget) -> None:
        mover = self._begun
        match order:
            case orders.Write(peer, handoff, src, dst):
                mover.write(peer, handoff, src, dst)
            case orders.Cancel(peer, handoff):
                mover.cancel(peer, handoff)
            case orders.Forget(peer):
                mover.forget(peer)
            case _:
                assert_never(order)

    async def _answer(self, call: orders.Call) -> None:
        try:
            answer = await self._result_of(call)
        except (ConfigError, ProtocolError, InvariantError) as error:
            whose = next(who for who, kind in orders.ERRORS.items() if isinstance(error, kind))
            answer = orders.Answer(problem=str(error), whose=whose)
        answer.number = call.number
        self._send(answer)

    async def _result_of(self, call: orders.Call) -> orders.Answer:
        match call:
            case orders.Begin():
                self._mover = await asyncio.to_thread(self._new_mover, call.me, self._on_stopped)
                return orders.Answer(description=self._mover.describe())
            case orders.Attach():
                await asyncio.wrap_future(self._begun.begin_attach(call.peer, call.description))
            case orders.TakeDigests():
                return orders.Answer(digests=await asyncio.to_thread(self._begun.region.digests, call.pages))
            case orders.Settle():
                await self._begun.settle(call.ended)
            case orders.Look():
                return orders.Answer(turn=self._begun.turn, stalled=tuple(self._begun.stalled))
            case orders.Close():
                await asyncio.to_thread(self._begun.close)
            case _:
                raise InvariantError(f"{type(call).__name__} is no call")
        return orders.Answer()

    @property
    def _begun(self) -> Mover:
        if self._mover is None:
            raise InvariantError("the mover has not begun")
        return self._mover

    def _on_stopped(self, message: ReceiverMessage) -> None:
        """Report the end of a copy; the mover's thread calls this."""
        assert isinstance(message.event, CopyStopped)
        stopped = orders.Stopped(message.peer, message.key, message.event)
        self._loop.call_soon_threadsafe(self._send, stopped)

    def _send(self, report: orders.Report) -> None:
        """Queue a report. There are no more of them than copies and calls that rank 0 waits for."""
        self._writer.write(packed(report))
