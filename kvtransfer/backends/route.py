"""One attached peer: the copies to it, cut into slices, and what of them is in flight.

Invariant: a slice that was posted is looked at until it has ended, whatever becomes of its copy.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np

from pdserve.kvtransfer.backends.copies import Copies, Copy
from pdserve.kvtransfer.backends.lane import Lane, LaneError, RemoteT, SliceLostError, SliceT
from pdserve.kvtransfer.backends.probe import Probe
from pdserve.kvtransfer.backends.progress import Progress
from pdserve.kvtransfer.mover import Description, Region

MAX_SLICES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, eq=False)
class InFlight(Generic[SliceT]):
    posted: SliceT
    copy: Copy
    num_bytes: int


class Route(Generic[RemoteT, SliceT]):
    """What the pump's thread keeps of one peer."""

    def __init__(self, lane: Lane[RemoteT, SliceT], region: Region, description: Description) -> None:
        """Open the lane to the peer; LaneError if that cannot be done."""
        self._lane = lane
        self._region = region
        self.remote = lane.open(description)
        self.description = description
        self.copies = Copies()
        self.in_flight: list[InFlight[SliceT]] = []
        self.progress = Progress()
        self.probe: Probe[SliceT] | None = None
        self.broken = ""  # why it must be opened anew

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self.in_flight) or self.is_probing

    @property
    def is_probing(self) -> bool:
        return self.probe is not None and self.probe.in_flight is not None

    @property
    def is_copying(self) -> bool:
        """Whether copies are under way, as far as bytes of them move: to a frozen peer none do."""
        return bool(self.copies) and not self.progress.is_stalled

    def is_measuring(self, now_s: float) -> bool:
        """Whether a probe's write is in flight, unless it hardly moves."""
        return self.probe is not None and self.is_probing and not self.probe.is_stuck(now_s)

    def shut(self) -> list[SliceT]:
        """Close the lane to the peer; return the slices whose end is still to be waited for."""
        self._lane.shut(self.remote)
        orphans = [each.posted for each in self.in_flight]
        if self.probe is not None:
            self.probe.fail("the peer was given up")
            if self.probe.in_flight is not None:
                orphans.append(self.probe.in_flight)
        return orphans

    def poll(self) -> bool:
        """Look at slices in flight; return whether any has ended."""
        still: list[InFlight[SliceT]] = []
        for each in self.in_flight:
            try:
                if not self._lane.landed(each.posted):
                    still.append(each)
                    continue
                self.progress.ended(each.num_bytes, landed=True)
            except LaneError as error:
                self.progress.ended(each.num_bytes, landed=False)
                each.copy.in_doubt = True
                self._fail(each.copy, str(error))
            self.copies.slice_ended(each.copy)
        moved = len(still) != len(self.in_flight)
        self.in_flight = still
        return self._poll_probe() or moved

    def post(self, slice_pages: int, now_s: float) -> bool:
        """Post the next slice that waits, if there is room for it; return whether there was one."""
        if len(self.in_flight) >= MAX_SLICES_IN_FLIGHT:
            return False
        copy = self.copies.next()
        if copy is None:
            return False
        part = slice(copy.num_posted, copy.num_posted + slice_pages)
        src, dst = copy.src[part], copy.dst[part]
        try:
            posted = self._lane.post(self.remote, np.array(src, np.int32), np.array(dst, np.int32))
        except LaneError as error:
            copy.in_doubt |= isinstance(error, SliceLostError)
            self._fail(copy, str(error))
            return True
        self.copies.posted(copy, len(src), has_landed=posted is None)
        if posted is not None:
            num_bytes = len(src) * self._region.page_bytes
            self.in_flight.append(InFlight(posted, copy, num_bytes))
            self.progress.posted(num_bytes, now_s)
        copy.digests += self._region.digests(src)
        return True

    def spoil_probe(self) -> None:
        """Note that copies are under way: what is being measured counts for nothing."""
        if self.probe is not None:
            self.probe.spoil()

    def post_probe(self) -> bool:
        """Post a probe's next write; return whether there was one."""
        probe = self.probe
        if probe is None or not probe.waits or self.progress.is_stalled:
            return False
        count = probe.begin()
        ours = np.arange(self._region.num_pages, self._region.num_pages + count, dtype=np.int32)
        theirs = np.arange(self.description.num_pages, self.description.num_pages + count, dtype=np.int32)
        try:
            probe.in_flight = self._lane.post(self.remote, ours, theirs)
        except LaneError as error:
            probe.fail(str(error))  # the next copy finds out for itself
            return True
        if probe.in_flight is None:
            probe.landed()
        return True

    def _poll_probe(self) -> bool:
        probe = self.probe
        if probe is None:
            return False
        moved = False
        if probe.in_flight is not None:
            try:
                moved = self._lane.landed(probe.in_flight)
                if moved:
                    probe.landed()
            except LaneError as error:
                probe.in_flight = None
                probe.fail(str(error))
                moved = True
        if probe.over:
            self.probe = None
        return moved

    def _fail(self, copy: Copy, reason: str) -> None:
        """After one failure nothing more goes to this peer until it is opened anew."""
        reason = reason or "the library does not say why"  # an empty reason stands for no failure
        self.broken = reason
        self.copies.fail(copy, reason)
        self.copies.fail_waiting(reason)
