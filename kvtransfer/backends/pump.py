"""One thread that drives copies, slice by slice, through a library's lane.

Invariant: a copy is reported stopped once, after every slice of it that was posted has ended, or after its peer's
process has.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Generic

from pdserve.clock import Clock, MonotonicClock
from pdserve.errors import InvariantError, ProtocolError
from pdserve.kvtransfer.backends.copies import Copy
from pdserve.kvtransfer.backends.lane import Lane, LaneError, RemoteT, SliceT
from pdserve.kvtransfer.backends.probe import Probe
from pdserve.kvtransfer.backends.route import Route
from pdserve.kvtransfer.mover import CopyId, CopyStopped, Description, OnStopped, PairSpeed, ProbeError, Region
from pdserve.kvtransfer.session import HandoffKey, Pages, Peer

logger = logging.getLogger(__name__)

SLICE_BYTES = 4 << 20  # posted at once: bounds how long the thread is away from other peers
MIN_SLICE_PAGES = 16  # however large: a post costs tens of microseconds beside its bytes
MAX_OUTSTANDING = 16384  # copies
MIN_WAIT_S, MAX_WAIT_S = 50e-6, 1e-3  # between two looks at slices in flight: no library says by itself that one landed
FINE = 1.125  # growth of that wait while a probe is timed: what is measured is off by no more


class Pump(Generic[RemoteT, SliceT]):
    """A mover over a lane. Every method may be called from any thread."""

    def __init__(
        self,
        name: str,
        lane: Lane[RemoteT, SliceT],
        region: Region,
        on_stopped: OnStopped,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._name = name
        self._lane = lane
        self._region = region
        self._on_stopped = on_stopped
        self._ids = count()
        self._slice_pages = max(MIN_SLICE_PAGES, SLICE_BYTES // region.page_bytes)
        self._routes: dict[Peer, Route[RemoteT, SliceT]] = {}
        self._orphans: list[SliceT] = []  # slices to processes that have ended
        self._num_outstanding = 0
        self._orders: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._turn = 0
        self._is_resting = False
        self._closing = False
        self._closed_because = "the mover is closed"
        self._questions: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name=f"mover-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_stalled(self) -> int:
        """Peers to which bytes are in flight and hardly move."""
        return sum(route.progress.is_stalled for route in list(self._routes.values()))

    @property
    def turn(self) -> int | None:
        """A number that changes whenever the thread comes round; None while it has nothing to do."""
        return None if self._is_resting else self._turn

    def attach(self, peer: Peer, description: bytes) -> None:
        """Prepare writes to a peer; blocks. ProtocolError if its description cannot be used."""
        remote = Description.decode(description)
        if remote.page_bytes != self._region.page_bytes:
            raise ProtocolError(f"page_bytes: {remote.page_bytes} there, {self._region.page_bytes} here")
        self._ask(partial(self._attach, peer, remote))

    def write(self, peer: Peer, handoff: HandoffKey, src: Pages, dst: Pages) -> CopyId:
        """Start to copy own pages `src` into the peer's pages `dst`. Never blocks; CopyStopped follows."""
        if len(src) != len(dst):
            raise InvariantError(f"{len(src)} pages to copy into {len(dst)}")
        copy = Copy(CopyId(next(self._ids)), handoff, src, dst)
        with self._news:
            full = self._num_outstanding >= MAX_OUTSTANDING
            self._num_outstanding += not full
        if full:
            self._on_stopped(CopyStopped(copy.copy_id, None, f"{MAX_OUTSTANDING} copies are outstanding already"))
        else:
            self._order(partial(self._take, peer, copy))
        return copy.copy_id

    def cancel(self, peer: Peer, handoff: HandoffKey) -> None:
        """Copy nothing more of a hand-off; its copies are reported once what was posted of them has ended."""
        self._order(partial(self._cancel, peer, handoff))

    def probe(self, peer: Peer) -> Future[PairSpeed]:
        """Measure how fast a peer is reached, whenever no copy is under way. Never blocks; ProbeError if it fails."""
        answer: Future[PairSpeed] = Future()
        self._order(partial(self._start_probe, peer, answer))
        return answer

    def forget(self, peer: Peer) -> None:
        """Report every outstanding copy to a peer as failed: its process is known to have ended."""
        self._order(partial(self._forget, peer))

    def cut(self, peer: Peer) -> None:
        """Do nothing: what a lane's library has read of the network is in its page, as far as it can be known."""

    def close(self) -> None:
        """Stop; blocks. Outstanding copies are not reported."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()

    def _ask(self, question: Callable[[], None]) -> None:
        """Have the thread carry something out; blocks until it has."""
        answer: Future[None] = Future()

        def run() -> None:
            try:
                question()
                answer.set_result(None)
            except ProtocolError as error:
                answer.set_exception(error)
            self._questions.discard(answer)  # whatever else is raised ends the thread, which answers what is left

        with self._news:
            self._questions.add(answer)
        self._order(run)
        answer.result()

    def _order(self, order: Callable[[], None]) -> None:
        with self._news:
            if self._closing:
                raise InvariantError(self._closed_because)
            self._orders.append(order)
            self._news.notify()

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # Outstanding copies stay outstanding; whoever orders next learns of it.
            logger.exception("the mover's thread has died")
            self._closed_because = "the mover's thread has died"
        with self._news:
            self._closing = True
            for answer in self._questions:
                answer.set_exception(InvariantError(self._closed_because))
        self._shut_down()

    def _serve(self) -> None:
        wait_s: float | None = None
        while True:
            self._turn += 1
            orders = self._await_orders(wait_s)
            if orders is None:
                return
            for order in orders:
                order()
            moved = self._move()
            self._orphans = [posted for posted in self._orphans if not self._ended(posted)]
            if moved:
                wait_s = 0.0
            elif self._orphans or any(route.is_busy for route in self._routes.values()):
                probes = any(route.is_probing for route in self._routes.values())
                wait_s = min((FINE if probes else 2.0) * wait_s, MAX_WAIT_S) if wait_s else MIN_WAIT_S
            else:
                wait_s = None

    def _move(self) -> bool:
        """Look at what is in flight, post what waits, report what is over; return whether anything has moved."""
        moved, thawed, now_s = False, False, self._clock.now_s()
        for peer, route in self._routes.items():
            was_stuck = not route.is_copying and not route.is_measuring(now_s)
            has_ended = route.poll()
            thawed |= has_ended and was_stuck
            moved |= has_ended
            moved |= route.post(self._slice_pages, now_s)
            for copy in route.copies.take_over():
                self._stopped(copy)
            if route.progress.look(now_s):
                num_bytes = route.progress.bytes_in_flight
                logger.warning("%s: %d bytes in flight hardly move; nothing is given up", peer.worker_id, num_bytes)
        return self._move_probes(now_s, thawed=thawed) or moved

    def _move_probes(self, now_s: float, *, thawed: bool) -> bool:
        """Probe one peer at a time, while no other bytes move; return whether a write was posted."""
        routes = self._routes.values()
        is_copying = any(route.is_copying for route in routes)
        if is_copying or thawed:
            for route in routes:
                route.spoil_probe()
        if is_copying or any(route.is_measuring(now_s) for route in routes):
            return False
        return any(route.post_probe() for route in routes)

    def _await_orders(self, wait_s: float | None) -> list[Callable[[], None]] | None:
        """Sleep until there are orders or the time is up; None: close."""
        with self._news:
            if not self._orders and not self._closing and wait_s != 0.0:
                self._is_resting = wait_s is None
                self._news.wait(wait_s)
                self._is_resting = False
            if self._closing:
                return None
            orders = list(self._orders)
            self._orders.clear()
        return orders

    def _attach(self, peer: Peer, description: Description) -> None:
        route = self._routes.get(peer)
        if route is not None:
            if not route.broken and route.description == description:
                return
            if route.copies:
                raise ProtocolError(f"{peer.worker_id}: {len(route.copies)} copies to it are still outstanding")
            self._orphans += route.shut()
            del self._routes[peer]
        try:
            self._routes[peer] = Route(self._lane, self._region, description)
        except LaneError as error:
            raise ProtocolError(f"mover_metadata: {error}") from error

    def _start_probe(self, peer: Peer, answer: Future[PairSpeed]) -> None:
        route = self._routes.get(peer)
        if route is None or route.broken or route.probe is not None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ProbeError(f"{peer.worker_id} is not attached, or being probed"))
            return
        count = min(len(self._region.probe), route.description.num_probe_pages)
        route.probe = Probe(answer, (count, self._region.page_bytes), self._lane.carrier, self._clock.now_s)

    def _take(self, peer: Peer, copy: Copy) -> None:
        self._mend(peer)
        route = self._routes.get(peer)
        if route is None:
            copy.failure = f"{peer.worker_id} is not attached"
            self._stopped(copy)
            return
        if any(page >= route.description.num_pages for page in copy.dst):
            copy.failure = f"{peer.worker_id} has {route.description.num_pages} pages, granted page {max(copy.dst)}"
        elif route.broken:
            copy.failure = route.broken
        route.copies.add(copy)

    def _cancel(self, peer: Peer, handoff: HandoffKey) -> None:
        route = self._routes.get(peer)
        if route is not None:
            route.copies.cancel(handoff, "cancelled")

    def _mend(self, peer: Peer) -> None:
        """Open a peer anew to which a copy has failed, unless one to it is outstanding: this may go better."""
        route = self._routes.get(peer)
        if route is None or not route.broken or route.copies:
            return
        try:
            self._attach(peer, route.description)
        except ProtocolError as error:
            logger.warning("%s cannot be opened anew: %s", peer.worker_id, error)

    def _forget(self, peer: Peer) -> None:
        route = self._routes.pop(peer, None)
        if route is None:
            return
        self._orphans += route.shut()
        for copy in route.copies:
            copy.in_doubt = False  # its pages have ended too
            copy.failure = copy.failure or f"the process of {peer.worker_id} has ended"
            self._stopped(copy)

    def _shut_down(self) -> None:
        """Give the lane back, unless something is still under way: then only the process's end stops it."""
        routes = self._routes.values()
        for route in routes:
            if route.probe is not None:
                route.probe.fail(self._closed_because)
        if self._orphans or any(route.is_busy for route in routes):
            return
        for route in routes:
            route.shut()
        self._lane.close()

    def _ended(self, posted: SliceT) -> bool:
        try:
            return self._lane.landed(posted)
        except LaneError:
            return True

    def _stopped(self, copy: Copy) -> None:
        with self._news:
            self._num_outstanding -= 1
        digests = None if copy.failure else copy.digests
        self._on_stopped(CopyStopped(copy.copy_id, digests, copy.failure, copy.in_doubt))
