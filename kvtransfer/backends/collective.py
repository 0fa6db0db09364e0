"""Moves pages with torch.distributed, point to point: gloo over TCP. For where NIXL cannot be had.

Two-sided: the receiver has to ask for each page. A writer connects to the receiver's listener, shows the secret from
its description, and the two become a group; then it names the pages of a slice on that socket and sends them through
the group, and the receiver answers with one byte when they are all in their places.

A receiver's thread writes only into the pages of its region. A peer's end, at any moment, ends its connection and its
thread here, and nothing else. A region must be memory of the host: gloo takes no other, and NCCL's kernels would wait
on the GPU for a peer that is frozen or dead.
"""

import hmac
import logging
import secrets
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch

from pdserve.kvtransfer.backends.framing import Framed
from pdserve.kvtransfer.backends.lane import Indices, LaneError, SliceLostError
from pdserve.kvtransfer.backends.pairing import READER, WRITER, Group, Work, meet
from pdserve.kvtransfer.backends.pump import Pump
from pdserve.kvtransfer.mover import Description, OnStopped, Region

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
CONNECT_TIMEOUT_S = 5.0
MAX_WRITERS = 256
MAX_SLICE_PAGES = 1 << 20
NEXT_ACCEPT_S = 0.1  # after a failure: what is short then may be free again
FOREVER = timedelta(days=365)  # how long a frozen writer is waited for
TAGS = 1 << 30


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

    def __init__(self, region: Region) -> None:
        self._region = region

    def open(self, description: Description) -> _Remote:
        token, address = description.lane[:TOKEN_BYTES], description.lane[TOKEN_BYTES:]
        host, _, port = address.decode(errors="replace").rpartition(":")
        if not host or not port.isdigit():
            raise LaneError("it does not name where it listens")
        try:
            framed = Framed(socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S))
        except OSError as error:
            raise LaneError(f"{host}:{port}: {error}") from error
        try:
            framed.send(token)
            return _Remote(framed, meet(framed, WRITER))
        except (OSError, RuntimeError) as error:
            framed.close()
            raise LaneError(f"{host}:{port}: {error}") from error

    def shut(self, remote: _Remote) -> None:
        remote.lost = remote.lost or "the connection was closed here"
        remote.framed.close()

    def post(self, remote: _Remote, src: Indices, dst: Indices) -> _Slice:
        try:
            remote.framed.send(dst.astype(">u4").tobytes())
            first = remote.num_pages
            works = tuple(
                remote.group.send([_row(self._region, page)], READER, (first + i) % TAGS)
                for i, page in enumerate(src.tolist())
            )
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


class _Receiver:
    """Listens for writers; a thread for each of them puts what it sends into the region."""

    def __init__(self, region: Region, host: str) -> None:
        self._region = region
        self._token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_WRITERS)
        self._writers: set[Framed] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="collective listener", daemon=True)
        self._thread.start()

    def lane(self, advertised: str) -> bytes:
        """Return what a writer's lane has to know."""
        return self._token + f"{advertised}:{self._listener.getsockname()[1]}".encode()

    def close(self) -> None:
        """Take no more writers, and end those there are; what one of them has under way may still land."""
        with self._lock:
            self._closed.set()
            writers = list(self._writers)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for framed in writers:
            framed.close()

    def _listen(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                logger.warning("a writer cannot be let in: %s", error)  # it has gone, or no file is left for it
                self._closed.wait(NEXT_ACCEPT_S)
                continue
            framed = Framed(connected)
            with self._lock:
                refused = self._closed.is_set() or len(self._writers) >= MAX_WRITERS
                if not refused:
                    self._writers.add(framed)
            if refused:
                framed.close()
                continue
            threading.Thread(target=self._attend, args=(framed,), name=f"writer {address}", daemon=True).start()

    def _attend(self, framed: Framed) -> None:
        try:
            framed.set_timeout(CONNECT_TIMEOUT_S)
            if hmac.compare_digest(framed.receive(TOKEN_BYTES), self._token):
                self._take(framed, meet(framed, READER))
        except (OSError, RuntimeError, ValueError) as error:
            logger.debug("a writer has gone: %s", error)
        finally:
            framed.close()
            with self._lock:
                self._writers.discard(framed)

    def _take(self, framed: Framed, group: Group) -> None:
        """Put slices into their pages until the writer ends."""
        num_rows = self._region.num_pages + len(self._region.probe)
        num_pages = 0
        while True:
            pages = np.frombuffer(framed.receive(4 * MAX_SLICE_PAGES), ">u4")
            if pages.max(initial=0) >= num_rows:
                raise OSError(f"page {pages.max()} is named, there are {num_rows}")
            works = [
                group.recv([_row(self._region, page)], WRITER, (num_pages + i) % TAGS)
                for i, page in enumerate(pages.tolist())
            ]
            for work in works:
                work.wait(FOREVER)
            num_pages += len(pages)
            framed.send_byte()


class CollectiveMover(Pump[_Remote, _Slice]):
    def __init__(self, region: Region, on_stopped: OnStopped, listen: tuple[str, str] = ("127.0.0.1", "")) -> None:
        """`listen`: the host on which writers are awaited, and the one that they are told, if it is another."""
        self._receiver = _Receiver(region, listen[0])
        self._description = region.describe(self._receiver.lane(listen[1] or listen[0]))
        super().__init__("collective", _CollectiveLane(region), region, on_stopped)

    def describe(self) -> bytes:
        """Return what another process's torch.distributed needs to write here."""
        return self._description

    def close(self) -> None:
        """Stop; blocks. Outstanding copies are not reported."""
        super().close()
        self._receiver.close()


def _row(region: Region, index: int) -> torch.Tensor:
    return torch.as_tensor(region.row(index))
