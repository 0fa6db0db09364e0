"""One thread that drives copies, slice by slice, through a library's lane.

Invariant: a copy is reported stopped once, after every slice of it that was posted has ended, or after its peer's
process has.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, Protocol, TypeVar

import numpy as np

from pdserve.errors import InvariantError, ProtocolError
from pdserve.kvtransfer.digest import page_digests
from pdserve.kvtransfer.mover import CopyId, CopyStopped, Description, OnStopped, Region
from pdserve.kvtransfer.session import Pages, Peer

logger = logging.getLogger(__name__)

SLICE_BYTES = 4 << 20  # posted at once: bounds how long the thread is away from other peers
MAX_SLICES_IN_FLIGHT = 4  # for each peer
MAX_OUTSTANDING = 16384  # copies
MIN_WAIT_S, MAX_WAIT_S = 50e-6, 1e-3  # between two looks at slices in flight

Indices = np.ndarray[tuple[int], np.dtype[np.int32]]
RemoteT = TypeVar("RemoteT")
SliceT = TypeVar("SliceT")


class LaneError(Exception):
    """A slice has ended without landing, or could not be posted: nothing of it is under way."""


class Lane(Protocol[RemoteT, SliceT]):
    """What a library does for the pump, in the pump's thread alone."""

    def open(self, description: Description) -> RemoteT:
        """Prepare writes to a peer's region; LaneError if it cannot be reached this way."""
        ...

    def shut(self, remote: RemoteT) -> None:
        """Undo `open`; what is in flight ends soon if the peer's process has ended."""
        ...

    def post(self, remote: RemoteT, src: Indices, dst: Indices) -> SliceT | None:
        """Start to write pages; None if they have landed already."""
        ...

    def landed(self, posted: SliceT) -> bool:
        """Return whether a slice has landed. After True, or a LaneError, it is gone."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Copy:
    copy_id: CopyId
    src: Pages
    dst: Pages
    num_posted: int = 0  # pages
    num_in_flight: int = 0  # slices
    digests: tuple[int, ...] = ()
    failure: str = ""

    @property
    def over(self) -> bool:
        return self.num_in_flight == 0 and (bool(self.failure) or self.num_posted == len(self.src))


@dataclass(slots=True, eq=False)
class _Route(Generic[RemoteT, SliceT]):
    """One attached peer. Copies wait in the order in which they are reported."""

    remote: RemoteT
    description: Description
    copies: deque[_Copy] = field(default_factory=deque)
    in_flight: list[tuple[SliceT, _Copy]] = field(default_factory=list)
    broken: str = ""  # why the next attach must open it anew


class Pump(Generic[RemoteT, SliceT]):
    """A mover over a lane. Every method may be called from any thread."""

    def __init__(self, name: str, lane: Lane[RemoteT, SliceT], region: Region, on_stopped: OnStopped) -> None:
        self._name = name
        self._lane = lane
        self._region = region
        self._on_stopped = on_stopped
        self._ids = count()
        self._slice_pages = max(1, SLICE_BYTES // region.page_bytes)
        self._routes: dict[Peer, _Route[RemoteT, SliceT]] = {}
        self._orphans: list[SliceT] = []  # slices to processes that have ended
        self._num_outstanding = 0
        self._orders: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._closing = False
        self._closed_because = "the mover is closed"
        self._questions: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name=f"mover-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    def attach(self, peer: Peer, description: bytes) -> None:
        """Prepare writes to a peer; blocks. ProtocolError if its description cannot be used."""
        remote = Description.decode(description)
        if remote.page_bytes != self._region.page_bytes:
            raise ProtocolError(f"page_bytes: {remote.page_bytes} there, {self._region.page_bytes} here")
        self._ask(partial(self._attach, peer, remote))

    def write(self, peer: Peer, src: Pages, dst: Pages) -> CopyId:
        """Start to copy own pages `src` into the peer's pages `dst`. Never blocks; CopyStopped follows."""
        if len(src) != len(dst):
            raise InvariantError(f"{len(src)} pages to copy into {len(dst)}")
        copy = _Copy(CopyId(next(self._ids)), src, dst)
        with self._news:
            full = self._num_outstanding >= MAX_OUTSTANDING
            self._num_outstanding += not full
        if full:
            self._on_stopped(CopyStopped(copy.copy_id, None, f"{MAX_OUTSTANDING} copies are outstanding already"))
        else:
            self._order(partial(self._take, peer, copy))
        return copy.copy_id

    def forget(self, peer: Peer) -> None:
        """Report every outstanding copy to a peer as failed: its process is known to have ended."""
        self._order(partial(self._forget, peer))

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
            self._questions.discard(answer)
            try:
                question()
                answer.set_result(None)
            except ProtocolError as error:
                answer.set_exception(error)

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
            orders = self._await_orders(wait_s)
            if orders is None:
                return
            for order in orders:
                order()
            moved = False
            for route in self._routes.values():
                moved |= self._poll(route)
                moved |= self._post(route)
                self._report(route)
            self._orphans = [posted for posted in self._orphans if not self._ended(posted)]
            if moved:
                wait_s = 0.0
            elif any(route.in_flight for route in self._routes.values()) or self._orphans:
                wait_s = min(2 * wait_s, MAX_WAIT_S) if wait_s else MIN_WAIT_S
            else:
                wait_s = None

    def _await_orders(self, wait_s: float | None) -> list[Callable[[], None]] | None:
        """Sleep until there are orders or the time is up; None: close."""
        with self._news:
            if not self._orders and not self._closing and wait_s != 0.0:
                self._news.wait(wait_s)
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
            self._lane.shut(route.remote)
            del self._routes[peer]
        try:
            remote = self._lane.open(description)
        except LaneError as error:
            raise ProtocolError(f"mover_metadata: {error}") from error
        self._routes[peer] = _Route(remote, description)

    def _take(self, peer: Peer, copy: _Copy) -> None:
        route = self._routes.get(peer)
        if route is None:
            copy.failure = f"{peer.worker_id} is not attached"
            self._stopped(copy)
            return
        if any(page >= route.description.num_pages for page in copy.dst):
            copy.failure = f"{peer.worker_id} has {route.description.num_pages} pages, granted page {max(copy.dst)}"
        elif route.broken:
            copy.failure = route.broken
        route.copies.append(copy)

    def _forget(self, peer: Peer) -> None:
        route = self._routes.pop(peer, None)
        if route is None:
            return
        self._lane.shut(route.remote)
        self._orphans += [posted for posted, _ in route.in_flight]
        for copy in route.copies:
            copy.failure = copy.failure or f"the process of {peer.worker_id} has ended"
            self._stopped(copy)

    def _poll(self, route: _Route[RemoteT, SliceT]) -> bool:
        """Look at slices in flight; return whether any has ended."""
        still: list[tuple[SliceT, _Copy]] = []
        for posted, copy in route.in_flight:
            try:
                if not self._lane.landed(posted):
                    still.append((posted, copy))
                    continue
            except LaneError as error:
                self._fail(route, copy, str(error))
            copy.num_in_flight -= 1
        moved = len(still) != len(route.in_flight)
        route.in_flight = still
        return moved

    def _post(self, route: _Route[RemoteT, SliceT]) -> bool:
        """Post the next slice that waits, if the peer has room for it; return whether there was one."""
        if len(route.in_flight) >= MAX_SLICES_IN_FLIGHT:
            return False
        copy = next((c for c in route.copies if not c.failure and c.num_posted < len(c.src)), None)
        if copy is None:
            return False
        part = slice(copy.num_posted, copy.num_posted + self._slice_pages)
        src, dst = copy.src[part], copy.dst[part]
        try:
            posted = self._lane.post(route.remote, np.array(src, np.int32), np.array(dst, np.int32))
        except LaneError as error:
            self._fail(route, copy, str(error))
            return True
        copy.num_posted += len(src)
        if posted is not None:
            copy.num_in_flight += 1
            route.in_flight.append((posted, copy))
        copy.digests += page_digests(self._region.view, src)
        return True

    def _fail(self, route: _Route[RemoteT, SliceT], copy: _Copy, reason: str) -> None:
        """After one failure nothing more goes to this peer until it is attached anew."""
        route.broken = reason
        for each in route.copies:
            if each is copy or each.num_posted < len(each.src):
                each.failure = each.failure or reason

    def _report(self, route: _Route[RemoteT, SliceT]) -> None:
        while route.copies and route.copies[0].over:
            self._stopped(route.copies.popleft())

    def _shut_down(self) -> None:
        """Give the lane back, unless something is still under way: then only the process's end stops it."""
        if self._orphans or any(route.in_flight for route in self._routes.values()):
            return
        for route in self._routes.values():
            self._lane.shut(route.remote)
        self._lane.close()

    def _ended(self, posted: SliceT) -> bool:
        try:
            return self._lane.landed(posted)
        except LaneError:
            return True

    def _stopped(self, copy: _Copy) -> None:
        with self._news:
            self._num_outstanding -= 1
        digests = None if copy.failure else copy.digests
        self._on_stopped(CopyStopped(copy.copy_id, digests, copy.failure))
