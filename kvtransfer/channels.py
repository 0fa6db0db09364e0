"""Channels to attached peers: copies are cut into slices, posted, and watched until they end.

Invariant: a slice that was posted is looked at until it has ended, whatever becomes of its copy, of its probe or of its
channel.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pdserve.base.clock import Clock
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer.backends.backend import Backend, PostError, Transfer, TransferLostError, Way
from pdserve.kvtransfer.conversion import Conversion, Slot, Stage
from pdserve.kvtransfer.copies import Copy, CopyQueue
from pdserve.kvtransfer.speed import PairSpeed, Probe, ProbeError, StallDetector
from pdserve.kvtransfer.ways import connect

logger = logging.getLogger(__name__)

SLICE_BYTES = 4 << 20  # posted at once: bounds how long the thread is away from other peers, and the memory of stages
MIN_SLICE_PAGES = 16  # however large, unless they are converted: a post costs tens of microseconds beside its bytes
MAX_SLICES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    transfer: Transfer
    copy: Copy | None  # None: a write of the probe
    num_bytes: int
    slot: Slot | None = None  # of a stage, where pages were converted

    def has_ended(self) -> bool:
        """Look at a transfer that nobody waits for any more."""
        try:
            has_ended = self.transfer.has_landed()
        except PostError:
            has_ended = True
        if has_ended:
            self.free()
        return has_ended

    def free(self) -> None:
        """Let what the transfer has read be written again: it has ended."""
        if self.slot is not None:
            self.slot.is_free = True


class Channel:
    """One attached peer: the copies to it, and what of them is in flight."""

    def __init__(self, backend: Backend, ways: tuple[Way, ...], stage: Stage | None) -> None:
        """Connect to the peer; PostError if that cannot be done. stage: where pages are converted for it."""
        self._source = backend.region if stage is None else stage.region
        self._connection = connect(backend, ways, self._source)
        self._own = backend.region
        self._slice_pages = slice_pages(self._source.page_bytes, converts=stage is not None)
        self.stage = stage
        self._in_flight: list[_InFlight] = []
        self.ways = ways
        self.num_pages = ways[0].there.num_pages  # of the peer, on each of its ranks
        self.copies = CopyQueue()
        self.stalls = StallDetector()
        self.probe: Probe | None = None
        self.is_probing = False  # a write of the probe is in flight
        self.broken = ""  # why it must be opened anew

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._in_flight)

    @property
    def is_copying(self) -> bool:
        """Whether copies are under way and their bytes move: to a frozen peer none do."""
        return bool(self.copies) and not self.stalls.is_stalled

    def is_measuring(self, now_s: float) -> bool:
        """Return whether a write of the probe is in flight and moves."""
        return self.probe is not None and self.is_probing and not self.probe.is_stuck(now_s)

    @property
    def conversion(self) -> Conversion | None:
        return None if self.stage is None else self.stage.conversion

    @property
    def probe_pages(self) -> tuple[int, int]:
        """Return how many pages of probe memory both ends have, and the bytes of one."""
        num_rows = [len(self._source.probe), *[way.there.num_probe_pages for way in self.ways]]
        return min(num_rows), self._source.page_bytes

    def close(self) -> list[_InFlight]:
        """Close the connection; return what is in flight, whose end is still to be waited for."""
        self._connection.close()
        if self.stage is not None:
            self.stage.is_taken = False
        if self.probe is not None:
            self.probe.fail("the peer was given up")
        return self._in_flight

    def poll(self) -> bool:
        """Look at what is in flight; return whether any of it has ended."""
        left: list[_InFlight] = []
        for each in self._in_flight:
            try:
                if each.transfer.has_landed():
                    self._ended(each, None)
                else:
                    left.append(each)
            except PostError as error:
                self._ended(each, error)
        has_ended = len(left) != len(self._in_flight)
        self._in_flight = left  # assigned last: if a look raises anything else, all of them stay in flight
        if self.probe is not None and self.probe.is_over and not self.is_probing:
            self.probe = None
        return has_ended

    def post(self, now_s: float) -> bool:
        """Post the next slice that waits, if few enough are in flight; return whether there was one."""
        if len(self._in_flight) - self.is_probing >= MAX_SLICES_IN_FLIGHT:
            return False
        copy = self.copies.next()
        if copy is None:
            return False
        part = slice(copy.num_posted, copy.num_posted + self._slice_pages)
        src, dst, slot = copy.src[part], copy.dst[part], None
        if self.stage is not None:
            slot, src = self.stage.fill(src, self._own.view)
        try:
            transfer = self._connection.post(np.array(src, np.int32), np.array(dst, np.int32))
        except PostError as error:
            self._break(copy, error)
            if slot is not None:
                slot.is_free = True
            return True
        self.copies.posted(copy, len(src), has_landed=transfer is None)
        if transfer is not None:
            num_bytes = len(src) * self._source.page_bytes
            self._in_flight.append(_InFlight(transfer, copy, num_bytes, slot))
            self.stalls.posted(num_bytes, now_s)
        elif slot is not None:
            slot.is_free = True
        copy.digests += self._source.digests_of_sent(src)
        return True

    def post_probe(self) -> bool:
        """Post the probe's next write; return whether there was one."""
        probe = self.probe
        if probe is None or probe.is_over or self.is_probing or self.stalls.is_stalled:
            return False
        pages = np.arange(probe.begin(), dtype=np.int32)
        try:
            transfer = self._connection.post(pages + self._source.num_pages, pages + self.num_pages)
        except PostError as error:
            probe.fail(str(error))  # the next copy finds out for itself
            return True
        if transfer is None:
            probe.landed()
        else:
            self._in_flight.append(_InFlight(transfer, None, 0))
            self.is_probing = True
        return True

    def _ended(self, ended: _InFlight, error: PostError | None) -> None:
        ended.free()
        if ended.copy is not None:
            self.stalls.ended(ended.num_bytes, landed=error is None)
            if error is not None:
                self._break(ended.copy, error)
            self.copies.slice_ended(ended.copy)
            return
        self.is_probing = False
        if self.probe is not None and error is None:
            self.probe.landed()
        elif self.probe is not None:
            self.probe.fail(str(error))

    def _break(self, copy: Copy, error: PostError) -> None:
        """After one failure, post nothing more to this peer until it is opened anew."""
        copy.in_doubt |= isinstance(error, TransferLostError)
        reason = str(error) or "the library does not say why"  # an empty reason would mean no failure
        self.broken = reason
        self.copies.fail(copy, reason)
        self.copies.cancel_all(reason)


class Channels:
    """Every attached peer. Used by the mover's thread alone; `stalled` by any."""

    def __init__(self, backend: Backend, report: Callable[[Copy], None], clock: Clock) -> None:
        self._backend = backend
        self._report = report
        self._clock = clock
        self._channels: dict[Peer, Channel] = {}
        self._orphans: list[_InFlight] = []  # to peers that were forgotten, or opened anew
        self._stages: list[Stage] = []  # kept: a library may hold on to their memory

    @property
    def stalled(self) -> frozenset[Peer]:
        return frozenset([peer for peer, channel in list(self._channels.items()) if channel.stalls.is_stalled])

    @property
    def is_busy(self) -> bool:
        return bool(self._orphans) or any(channel.is_busy for channel in self._channels.values())

    @property
    def is_probing(self) -> bool:
        return any(channel.is_probing for channel in self._channels.values())

    def attach(self, peer: Peer, ways: tuple[Way, ...], conversion: Conversion | None = None) -> None:
        """Open a channel; open it anew if it is broken or the ways there have changed. ProtocolError if it cannot."""
        channel = self._channels.get(peer)
        if channel is not None:
            if not channel.broken and (channel.ways, channel.conversion) == (ways, conversion):
                return
            if channel.copies:
                raise ProtocolError(f"{peer.worker_id}: {len(channel.copies)} copies to it are still outstanding")
            self._orphans += channel.close()
            del self._channels[peer]
        stage = None if conversion is None else self._stage_of(conversion)
        try:
            self._channels[peer] = Channel(self._backend, ways, stage)
        except PostError as error:
            raise ProtocolError(f"mover_metadata: {error}") from error
        if stage is not None:
            stage.is_taken = True

    def _stage_of(self, conversion: Conversion) -> Stage:
        """Return a stage that nobody uses: there are as many as peers of another type were attached at once."""
        for stage in self._stages:
            if stage.is_idle and stage.conversion == conversion:
                return stage
        self._stages.append(Stage(conversion, MAX_SLICES_IN_FLIGHT, slice_pages(conversion.page_bytes, converts=True)))
        return self._stages[-1]

    def write(self, copy: Copy) -> None:
        """Take in a copy; it is posted by `move`, or reported as failed."""
        peer = copy.peer
        self._reopen(peer)
        channel = self._channels.get(peer)
        if channel is None:
            copy.failure = f"{peer.worker_id} is not attached"
            self._report(copy)
            return
        num_pages = channel.num_pages
        if any(page >= num_pages for page in copy.dst):
            copy.failure = f"{peer.worker_id} has {num_pages} pages, granted page {max(copy.dst)}"
        elif channel.broken:
            copy.failure = channel.broken
        channel.copies.add(copy)

    def cancel(self, peer: Peer, handoff: AttemptKey) -> None:
        if peer in self._channels:
            self._channels[peer].copies.cancel(handoff, "cancelled")

    def probe(self, peer: Peer, answer: Future[PairSpeed]) -> None:
        channel = self._channels.get(peer)
        if channel is None or channel.broken or channel.probe is not None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ProbeError(f"{peer.worker_id} is not attached, or being probed"))
            return
        channel.probe = Probe(answer, channel.probe_pages, self._backend.carrier, self._clock.now_s)

    def forget(self, peer: Peer) -> None:
        """Report every copy to a peer whose process has ended; watch its transfers to their end."""
        channel = self._channels.pop(peer, None)
        if channel is None:
            return
        self._orphans += channel.close()
        for copy in channel.copies:
            copy.in_doubt = False  # the pages that late bytes could reach have ended with the process
            copy.failure = copy.failure or f"the process of {peer.worker_id} has ended"
            self._report(copy)

    def move(self) -> bool:
        """Look at what is in flight, post what waits, report what is over; return whether anything has moved."""
        has_moved, has_thawed, now_s = False, False, self._clock.now_s()
        for peer, channel in self._channels.items():
            was_stuck = not channel.is_copying and not channel.is_measuring(now_s)
            has_ended = channel.poll()
            has_thawed |= has_ended and was_stuck
            has_moved |= has_ended
            has_moved |= channel.post(now_s)
            for copy in channel.copies.pop_finished():
                self._report(copy)
            if channel.stalls.has_stalled(now_s):
                num_bytes = channel.stalls.bytes_in_flight
                logger.warning("%s: %d bytes in flight hardly move; nothing is given up", peer.worker_id, num_bytes)
        self._orphans = [orphan for orphan in self._orphans if not orphan.has_ended()]
        return self._move_probes(now_s, has_thawed=has_thawed) or has_moved

    def close(self, reason: str) -> None:
        """Close all connections, unless something is in flight: then only the process's end stops it."""
        for channel in self._channels.values():
            if channel.probe is not None:
                channel.probe.fail(reason)
        if not self.is_busy:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()  # a library may hold threads and files for as long as its connection exists

    def _move_probes(self, now_s: float, *, has_thawed: bool) -> bool:
        """Probe one peer at a time, while no other bytes move; return whether a write was posted."""
        channels = self._channels.values()
        is_copying = any(channel.is_copying for channel in channels)
        if is_copying or has_thawed:
            for channel in channels:
                if channel.probe is not None:
                    channel.probe.spoil()
        if is_copying or any(channel.is_measuring(now_s) for channel in channels):
            return False
        return any(channel.post_probe() for channel in channels)

    def _reopen(self, peer: Peer) -> None:
        """Open a broken channel anew, unless copies to the peer are outstanding."""
        channel = self._channels.get(peer)
        if channel is None or not channel.broken or channel.copies:
            return
        try:
            self.attach(peer, channel.ways, channel.conversion)
        except ProtocolError as error:
            logger.warning("%s cannot be opened anew: %s", peer.worker_id, error)


def slice_pages(page_bytes: int, *, converts: bool) -> int:
    """Return how many pages are posted at once."""
    return max(1 if converts else MIN_SLICE_PAGES, SLICE_BYTES // page_bytes)
