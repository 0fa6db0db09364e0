"""Moves pages of this process into other processes' memory, whichever library does it.

Invariant: a copy is reported stopped once, after every slice of it that was posted has ended, or after its peer's
process has. The time that a copy takes never ends it. The mover's owner keeps the source pages unchanged until then.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.errors import InvariantError, ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer.backends.backend import Backend
from pdserve.kvtransfer.channels import Channels
from pdserve.kvtransfer.conversion import Conversion
from pdserve.kvtransfer.copies import Copy, OnStopped
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.speed import PairSpeed, until_read
from pdserve.kvtransfer.ways import ways_to
from pdserve.protocol.page_tables import Pages

logger = logging.getLogger(__name__)

MAX_OUTSTANDING = 16384  # copies
MIN_WAIT_S, MAX_WAIT_S = 50e-6, 1e-3  # between two looks at what is in flight: no library signals that a write landed
GROWTH, PROBE_GROWTH = 2.0, 1.125  # of that wait; during a probe it bounds the error of the probe's timing

Order = tuple[Callable[[], None], Future[None] | None]  # for the thread, and who waits until it is carried out


class Mover:
    """Writes pages of a backend's region into those of other processes, in a thread of its own.

    Every method may be called from any thread. Copies of one hand-off are reported stopped in the order in which they
    were written; a hand-off with few pages left overtakes others to the same peer. Reports come from the mover's
    thread.
    """

    def __init__(self, backend: Backend, on_stopped: OnStopped, clock: Clock | None = None) -> None:
        self._backend = backend
        self._on_stopped = on_stopped
        self._channels = Channels(backend, self._report, clock or MonotonicClock())
        self._num_outstanding = 0
        self._orders: deque[Order] = deque()
        self._wake = threading.Condition()
        self._turn = 0
        self._is_resting = False
        self._closed_because = ""
        self._thread = threading.Thread(target=self._run, name=f"mover-{backend.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Which library it is; both ends must use the same."""
        return self._backend.name

    @property
    def region(self) -> Region:
        return self._backend.region

    @property
    def stalled(self) -> frozenset[Peer]:
        """Return to which peers bytes are in flight and hardly move."""
        return self._channels.stalled

    @property
    def num_stalled(self) -> int:
        return len(self.stalled)

    @property
    def turn(self) -> int | None:
        """A number that changes whenever the thread comes round; None while it has nothing to do."""
        return None if self._is_resting else self._turn

    @property
    def turns(self) -> tuple[int | None, ...]:
        """Return the turn of each thread that moves pages."""
        return (self.turn,)

    def describe(self) -> bytes:
        """Return what another process needs to write here; opaque to all but movers of the same name."""
        return self.region.described(self._backend.metadata)

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        """Return the position of the first page here whose digest differs, or None."""
        return self.region.first_mismatch(pages, digests)

    def attach(self, peer: Peer, description: bytes, conversion: Conversion | None = None) -> None:
        """Prepare writes to a peer; blocks, and raises what `begin_attach` does."""
        self.begin_attach(peer, description, conversion).result()

    def begin_attach(self, peer: Peer, description: bytes, conversion: Conversion | None = None) -> Future[None]:
        """Have writes to a peer prepared. ProtocolError, here or later, if its description cannot be used.

        conversion: of every page, before it is written there.

        A peer to which a copy has failed is opened anew by the next copy, or by attaching it again, once no copy to it
        is outstanding.
        """
        sent_bytes = self.region.page_bytes if conversion is None else conversion.page_bytes
        ways = ways_to(description, self.region, sent_bytes)
        attached: Future[None] = Future()
        self._order(partial(self._channels.attach, peer, ways, conversion), attached)
        return attached

    def write(self, peer: Peer, handoff: AttemptKey, src: Pages, dst: Pages) -> None:
        """Start to copy own pages `src` into the peer's pages `dst`. Never blocks; CopyStopped follows."""
        if len(src) != len(dst):
            raise InvariantError(f"{len(src)} pages to copy into {len(dst)}")
        copy = Copy(peer, handoff, src, dst)
        with self._wake:
            is_full = self._num_outstanding >= MAX_OUTSTANDING
            self._num_outstanding += not is_full
        if is_full:
            copy.failure = f"{MAX_OUTSTANDING} copies are outstanding already"
            self._on_stopped(copy.report())
        else:
            self._order(partial(self._channels.write, copy))

    def cancel(self, peer: Peer, handoff: AttemptKey) -> None:
        """Copy nothing more of a hand-off. Never blocks.

        Each of its copies is reported all the same, once what was posted of it has ended.
        """
        self._order(partial(self._channels.cancel, peer, handoff))

    def probe(self, peer: Peer) -> Future[PairSpeed]:
        """Measure how fast a peer is reached, whenever no copy is under way. Never blocks; ProbeError if it fails."""
        answer: Future[PairSpeed] = Future()
        self._order(partial(self._channels.probe, peer, answer))
        return answer

    def forget(self, peer: Peer) -> None:
        """Report every outstanding copy to a peer as failed: its process is known to have ended."""
        self._order(partial(self._channels.forget, peer))

    def cut(self, peer: Peer) -> None:
        """Let nothing that this process has read of a peer's reach a page any more: the peer's process has ended.

        Blocks while bytes of it are copied into pages.
        """
        self._backend.cut(peer)

    async def settle(self, ended: Peer) -> None:
        """Return when nothing that an ended process has sent can reach a page of this process any more."""
        # Cut first: a backend may read no further from the sockets of a writer whose machine has gone silently.
        await asyncio.to_thread(self.cut, ended)
        await until_read()

    def close(self) -> None:
        """Stop; blocks. Outstanding copies are not reported."""
        self._stop("the mover is closed")
        self._thread.join()
        self._backend.close(in_flight=self._channels.is_busy)

    def _order(self, run: Callable[[], None], done: Future[None] | None = None) -> None:
        with self._wake:
            if self._closed_because:
                raise InvariantError(self._closed_because)
            self._orders.append((run, done))
            self._wake.notify()

    def _stop(self, reason: str) -> None:
        with self._wake:
            self._closed_because = self._closed_because or reason
            self._wake.notify()

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._backend.begin()
            self._serve()
        except Exception:
            # Outstanding copies are never reported. The next order raises InvariantError.
            logger.exception("the mover's thread has died")
            self._stop("the mover's thread has died")
        for _, done in self._orders:  # no more can come
            if done is not None:
                done.set_exception(InvariantError(self._closed_because))
        self._channels.close(self._closed_because)

    def _serve(self) -> None:
        wait_s: float | None = None
        while True:
            self._turn += 1
            num_orders = self._await_orders(wait_s, self._backend.progress())
            if self._closed_because:
                return
            for _ in range(num_orders):
                self._carry_out(*self._orders[0])
                self._orders.popleft()
            if self._channels.move():
                wait_s = 0.0
            elif self._channels.is_busy:
                growth = PROBE_GROWTH if self._channels.is_probing else GROWTH
                wait_s = min(growth * wait_s, MAX_WAIT_S) if wait_s else MIN_WAIT_S
            else:
                wait_s = None

    def _await_orders(self, wait_s: float | None, at_most_s: float | None) -> int:
        """Sleep until there are orders, the time is up or the mover is closed; return how many orders there are."""
        with self._wake:
            if not self._orders and not self._closed_because and wait_s != 0.0:
                self._is_resting = wait_s is None
                times_s = [each for each in (wait_s, at_most_s) if each is not None]
                self._wake.wait(min(times_s, default=None))
                self._is_resting = False
            return len(self._orders)

    def _carry_out(self, run: Callable[[], None], done: Future[None] | None) -> None:
        try:
            run()
        except ProtocolError as error:
            if done is None:
                raise
            done.set_exception(error)
        else:
            if done is not None:
                done.set_result(None)

    def _report(self, copy: Copy) -> None:
        with self._wake:
            self._num_outstanding -= 1
        self._on_stopped(copy.report())
