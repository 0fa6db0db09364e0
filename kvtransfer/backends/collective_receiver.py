"""The receiver's half of the mover over torch.distributed: lets writers in, and puts what they send into pages.

A writer connects to the listener. The two prove to each other that they know the cluster's secret; then the writer is
believed which process it is, and they become a group. Then it names the pages of a slice on that socket and sends them
through the group, and is answered with one byte when all of them are in their places.

Invariant: a writer's thread writes into the rows of the region alone, and into none once its process was cut, but for
memory of the host: that is written as bytes are read from the network. A peer's end, at any moment, ends its
connection and its thread here, and nothing else.
"""

import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from pdserve.kvtransfer.backends.framing import Framed
from pdserve.kvtransfer.backends.pairing import READER, REGION_BYTES, WRITER, Group, Meeting, be_greeted, meet, tag
from pdserve.kvtransfer.backends.staging import Entry, Staging
from pdserve.kvtransfer.mover import Region
from pdserve.kvtransfer.session import Peer

logger = logging.getLogger(__name__)

MAX_WRITERS = 256  # those that have yet to prove themselves included
MAX_GONE = 4096  # ended processes that are remembered, and refused
MAX_SLICE_PAGES = 1 << 20
NEXT_ACCEPT_S = 0.1  # after a failure: what is short then may be free again
FOREVER = timedelta(days=365)  # how long a frozen writer is waited for
LEAVE_S = 1.0  # how long writers' threads are waited for at the end; what waits for a frozen writer stays behind


@dataclass(slots=True, eq=False)
class _Writer:
    framed: Framed
    entry: Entry
    peer: Peer | None = None  # until it has said who it is

    def end(self) -> None:
        """Let nothing more of it into pages; blocks while a copy is under way."""
        self.entry.cut()
        self.framed.close()


class Receiver:
    """Listens for writers; a thread for each of them puts what it sends into the region."""

    def __init__(self, region: Region, staging: Staging | None, meeting: Meeting) -> None:
        self._region = region
        self._staging = staging
        self._meeting = meeting
        self._region_id = secrets.token_bytes(REGION_BYTES)  # a later process may listen where this one did
        family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
        self._listener = socket.create_server((meeting.host, 0), family=family, backlog=MAX_WRITERS)
        self._writers: dict[_Writer, threading.Thread] = {}
        self._gone: OrderedDict[Peer, None] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="collective listener", daemon=True)
        self._thread.start()

    def lane(self) -> bytes:
        """Return what a writer's lane has to know."""
        host = self._meeting.told or self._meeting.host
        return self._region_id + f"{host}:{self._listener.getsockname()[1]}".encode()

    def cut(self, peer: Peer) -> None:
        """End the connections of a process and let it in no more; blocks while bytes of it are copied into pages."""
        with self._lock:
            self._gone[peer] = None
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
            ended = [writer for writer in self._writers if writer.peer == peer]
        for writer in ended:
            writer.end()

    def close(self) -> None:
        """Take no more writers, and end those there are; in memory of the host, what is under way may still land."""
        with self._lock:
            self._closed.set()
            writers = dict(self._writers)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for writer in writers:
            writer.end()
        # A thread that still takes its group down when the interpreter ends would abort the process.
        until_s = time.monotonic() + LEAVE_S
        for thread in writers.values():
            thread.join(max(0.0, until_s - time.monotonic()))

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
            writer = _Writer(Framed(connected), Entry(self._region, self._staging))
            thread = threading.Thread(target=self._attend, args=(writer,), name=f"writer {address}", daemon=True)
            if not self._start(writer, thread):
                writer.framed.close()

    def _start(self, writer: _Writer, thread: threading.Thread) -> bool:
        """Start a writer's thread; return False if there is no room, or no thread left, for another one."""
        with self._lock:
            if self._closed.is_set() or not self._has_room():
                return False
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("a writer cannot be let in: %s", error)
                return False
            self._writers[writer] = thread
            return True

    def _has_room(self) -> bool:
        """Return whether another writer can come in; when full, close the oldest connection without a proof for it."""
        if len(self._writers) < MAX_WRITERS:
            return True
        stranger = next((writer for writer in self._writers if writer.peer is None), None)
        if stranger is None:
            return False
        del self._writers[stranger]
        stranger.framed.close()
        return True

    def _attend(self, writer: _Writer) -> None:
        framed = writer.framed
        try:
            self._let_in(writer, be_greeted(framed, self._meeting.secret, self._region_id))
            self._take(writer, meet(framed, READER))
        except (OSError, RuntimeError, ValueError) as error:
            logger.debug("a writer has gone: %s", error)
        finally:
            framed.close()
            with self._lock:
                self._writers.pop(writer, None)

    def _let_in(self, writer: _Writer, peer: Peer) -> None:
        """Note who a writer is; OSError for one that may not write here."""
        with self._lock:
            if peer in self._gone:
                raise OSError(f"{peer} is known to have ended")
            if writer not in self._writers:
                raise OSError("it has made room for another one")
            writer.peer = peer

    def _take(self, writer: _Writer, group: Group) -> None:
        """Put slices into their pages until the writer ends."""
        num_rows = self._region.num_pages + len(self._region.probe)
        num_taken = 0
        while True:
            pages = np.frombuffer(writer.framed.receive(4 * MAX_SLICE_PAGES), ">u4")
            if pages.max(initial=0) >= num_rows:
                raise OSError(f"page {pages.max()} is named, there are {num_rows}")
            for part in writer.entry.parts(pages.tolist()):
                works = [group.recv([row], WRITER, tag(num_taken + i)) for i, row in enumerate(part.memory)]
                for work in works:
                    work.wait(FOREVER)
                writer.entry.put(part)
                num_taken += len(part.rows)
            writer.framed.send_byte()
