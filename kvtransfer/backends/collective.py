"""Moves pages with torch.distributed, point to point: gloo over TCP. For where NIXL cannot be had.

Two-sided: the receiver has to ask for each page, so it has a listener and a thread for each writer
(`collective_receiver.py`). Gloo takes memory of the host alone: pages of a GPU pass through it at both ends
(`staging.py`).
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.kvtransfer.backends.collective_receiver import Receiver
from pdserve.kvtransfer.backends.framing import Framed
from pdserve.kvtransfer.backends.lane import Indices, LaneError, SliceLostError
from pdserve.kvtransfer.backends.pairing import (
    READER,
    REGION_BYTES,
    WRITER,
    Greeting,
    Group,
    Meeting,
    Work,
    greet,
    meet,
    tag,
)
from pdserve.kvtransfer.backends.pump import Pump
from pdserve.kvtransfer.backends.staging import Staging, row_of
from pdserve.kvtransfer.mover import Description, OnStopped, Region
from pdserve.kvtransfer.session import Peer

CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class _Remote:
    framed: Framed
    group: Group
    num_pages: int = 0  # sent, of all slices
    num_posted: int = 0
    num_landed: int = 0
    lost: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    remote: _Remote
    number: int  # of the remote's slices, from 1 on: they land in their order
    works: tuple[Work, ...]  # kept until they have landed


class _CollectiveLane:
    carrier = "tcp"

    def __init__(self, me: Peer, region: Region, staging: Staging | None, secret: bytes) -> None:
        self._me = me
        self._secret = secret
        self._region = region
        self._staging = staging

    def open(self, description: Description) -> _Remote:
        region, address = description.lane[:REGION_BYTES], description.lane[REGION_BYTES:]
        host, _, port = address.decode(errors="replace").rpartition(":")
        if not host or not port.isdigit():
            raise LaneError("it does not name where it listens")
        try:
            framed = Framed(socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S))
        except OSError as error:
            raise LaneError(f"{host}:{port}: {error}") from error
        try:
            greet(framed, self._secret, Greeting(region, self._me))
            return _Remote(framed, meet(framed, WRITER))
        except (OSError, RuntimeError) as error:
            framed.close()
            raise LaneError(f"{host}:{port}: {error}") from error

    def shut(self, remote: _Remote) -> None:
        remote.lost = remote.lost or "the connection was closed here"
        remote.framed.close()

    def post(self, remote: _Remote, src: Indices, dst: Indices) -> _Slice:
        rows = self._in_host(src.tolist())
        try:
            remote.framed.send(dst.astype(">u4").tobytes())
            first = remote.num_pages
            works = tuple(remote.group.send([row], READER, tag(first + i)) for i, row in enumerate(rows))
        except (OSError, RuntimeError) as error:
            self.shut(remote)
            raise SliceLostError(str(error)) from error
        remote.num_pages += len(works)
        remote.num_posted += 1
        return _Slice(remote, remote.num_posted, works)

    def landed(self, posted: _Slice) -> bool:
        remote = posted.remote
        if not remote.lost and posted.number > remote.num_landed:
            try:
                remote.num_landed += remote.framed.count_bytes()
            except OSError as error:
                remote.lost = str(error)
        if posted.number <= remote.num_landed:
            return True
        if remote.lost:
            raise SliceLostError(remote.lost)
        return False

    def close(self) -> None:
        pass

    def _in_host(self, src: list[int]) -> Sequence[Tensor]:
        """Return what pages hold, in memory that gloo takes."""
        if self._staging is None:
            return [row_of(self._region, page) for page in src]
        try:
            return list(self._staging.take_out(src))
        except RuntimeError as error:
            raise LaneError(str(error)) from error


class CollectiveMover(Pump[_Remote, _Slice]):
    def __init__(self, me: Peer, region: Region, on_stopped: OnStopped, meeting: Meeting, staged: bool = False) -> None:
        """`staged`: pages pass through other memory of the host, as those of a GPU always do."""
        staging = Staging(region) if staged or region.gpu is not None else None
        self._receiver = Receiver(region, staging, meeting)
        self._description = region.describe(self._receiver.lane())
        super().__init__("collective", _CollectiveLane(me, region, staging, meeting.secret), region, on_stopped)

    def describe(self) -> bytes:
        """Return what another process's torch.distributed needs to write here."""
        return self._description

    def cut(self, peer: Peer) -> None:
        """Let nothing more of an ended process into pages; blocks while bytes of it are copied there."""
        self._receiver.cut(peer)

    def close(self) -> None:
        """Stop; blocks. Outstanding copies are not reported."""
        super().close()
        self._receiver.close()
