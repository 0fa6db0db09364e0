"""The mover of another rank of this worker, in that rank's own process, which alone maps the rank's memory.

Invariant: a copy is reported stopped once that mover has said so. If the rank's process ends or hangs, it never is.
"""

import logging
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count

import msgspec

from pdserve.base.errors import InvariantError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer import remote_orders as orders
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import MAX_OUTSTANDING
from pdserve.net.frames import Channel
from pdserve.protocol.page_tables import Pages

logger = logging.getLogger(__name__)

CLOSE_S = 5.0  # for a rank to close its mover; one that is frozen does not


class RemoteMover:
    """See `Mover`, whose methods these are; those that block there return a future here."""

    def __init__(self, connected: socket.socket, me: Peer, part: int, on_stopped: OnStopped) -> None:
        """Start the mover of rank `part`, which reads this socket. Whoever owns the socket closes it after `close`."""
        self._part, self._on_stopped = part, on_stopped
        self._channel = Channel(connected)
        self._orders = queue.SimpleQueue[orders.Order | None]()  # few: writes are counted, others rare
        self._numbers, self._num_outstanding, self._lock = count(), 0, threading.Lock()
        self._calls: dict[int, Future[orders.Answer]] = {}
        self._ended_because = ""
        for run in (self._send_orders, self._take_reports):
            threading.Thread(target=run, name=f"rank-{part}-mover", daemon=True).start()
        self._begun = self._call(lambda number: orders.Begin(number, me))
        self._seen, self._look = orders.Answer(), self._begun  # the last answer to a look, and the last look

    @property
    def description(self) -> bytes:
        """Return what another process needs to write there. Waits until the mover has begun: ConfigError if not."""
        return self._begun.result().description

    @property
    def stalled(self) -> frozenset[Peer]:
        return frozenset(self._seen.stalled)

    @property
    def turn(self) -> int | None:
        """As the rank said when it was last asked, and asks it anew; a number that stays while it does not answer."""
        if not self._look.done() or self._look.exception() is not None:
            return self._seen.turn or 0
        self._seen, self._look = self._look.result(), self._call(orders.Look)
        return self._seen.turn

    def attach(self, peer: Peer, description: bytes) -> Future[orders.Answer]:
        return self._call(lambda number: orders.Attach(number, peer, description))

    def digests(self, pages: Pages) -> Future[orders.Answer]:
        return self._call(lambda number: orders.TakeDigests(number, pages))

    def settle(self, ended: Peer) -> Future[orders.Answer]:
        return self._call(lambda number: orders.Settle(number, ended))

    def write(self, peer: Peer, handoff: AttemptKey, src: Pages, dst: Pages) -> None:
        with self._lock:
            is_full = self._num_outstanding >= MAX_OUTSTANDING
            self._num_outstanding += not is_full
        if is_full:
            failed = f"{MAX_OUTSTANDING} copies are outstanding already"
            self._on_stopped(ReceiverMessage(peer, handoff, CopyStopped(None, failed, part=self._part)))
        else:
            self._orders.put(orders.Write(peer, handoff, src, dst))

    def cancel(self, peer: Peer, handoff: AttemptKey) -> None:
        self._orders.put(orders.Cancel(peer, handoff))

    def forget(self, peer: Peer) -> None:
        self._orders.put(orders.Forget(peer))

    def close(self) -> None:
        """Let the rank close its mover; blocks, for a while if the rank is frozen."""
        try:
            self._call(orders.Close).result(CLOSE_S)
        except (TimeoutError, InvariantError) as error:
            why = str(error) or f"it is silent for {CLOSE_S:g} s"
            logger.warning("rank %d has not closed its mover: %s", self._part, why)
        self._orders.put(None)

    def _call(self, order_of: Callable[[int], orders.Order]) -> Future[orders.Answer]:
        number, answer = next(self._numbers), Future[orders.Answer]()
        with self._lock:
            self._calls[number] = answer
        self._orders.put(order_of(number))
        if self._ended_because:
            self._fail_calls()
        return answer

    def _send_orders(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._channel.send(order)
        except OSError:
            return  # the rank has ended, as the other thread finds out

    def _take_reports(self) -> None:
        reports = msgspec.msgpack.Decoder(orders.Report)
        try:
            while True:
                report: orders.Report = reports.decode(self._channel.next_frame())
                if isinstance(report, orders.Stopped):
                    self._stopped(report)
                else:
                    self._answered(report)
        except (OSError, EOFError):
            self._ended_because = "its process has ended"
        except Exception as error:
            # Its turn stays the same from now on, and its copies are never reported.
            logger.exception("reports of rank %d cannot be read any more", self._part)
            self._ended_because = f"its reports cannot be read: {error}"
        self._fail_calls()

    def _stopped(self, report: orders.Stopped) -> None:
        with self._lock:
            self._num_outstanding -= 1
        self._on_stopped(ReceiverMessage(report.peer, report.handoff, replace(report.ended, part=self._part)))

    def _answered(self, answer: orders.Answer) -> None:
        with self._lock:
            waiting = self._calls.pop(answer.number, None)
        if waiting is not None and waiting.set_running_or_notify_cancel():  # unless who asked has gone
            if answer.problem:
                waiting.set_exception(orders.ERRORS[answer.whose](f"rank {self._part}: {answer.problem}"))
            else:
                waiting.set_result(answer)

    def _fail_calls(self) -> None:
        with self._lock:
            numbers = tuple(self._calls)
        for number in numbers:
            self._answered(orders.Answer(number, problem=self._ended_because))
