"""The receiver's half of the backend over torch.distributed: accepts writers, and puts what they send into pages.

A writer connects to the listener. The two prove to each other that they know the cluster's secret. From then on the
receiver believes which process the writer says it is, and they become a gloo group. For each slice, the writer names
the pages on that socket and sends them through the group. The receiver answers with one byte when all of them are in
their places.

Invariant: a writer's thread writes into the rows of the region alone. After its process was cut it writes into none,
except rows in memory of the host that are not staged: gloo writes these as it reads bytes from the network. A peer's
end, at any moment, ends its connection and its thread here, and nothing else.
"""

import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from pdserve.kvtransfer.backends.pairing import READER, REGION_BYTES, Framed, Meeting, Pair, be_greeted, meet
from pdserve.kvtransfer.backends.staging import HostRows, Rows
from pdserve.kvtransfer.session import Peer

logger = logging.getLogger(__name__)

MAX_WRITERS = 256  # those that have yet to prove themselves included
MAX_GONE = 4096  # ended processes that are remembered, and refused
MAX_SLICE_PAGES = 1 << 20
NEXT_ACCEPT_S = 0.1  # after a failure: what is short then may be free again
LEAVE_S = 1.0  # how long writers' threads are waited for at the end; what waits for a frozen writer stays behind


class Writer:
    """One connected writer. Its thread receives rows; any thread may cut it."""

    def __init__(self, framed: Framed, rows: HostRows) -> None:
        self.framed = framed
        self.peer: Peer | None = None  # until it has proved that it knows the secret
        self._rows = rows
        self._lock = threading.Lock()
        self._is_cut = False

    def put(self, rows: Rows, receive: Callable[[Sequence[Tensor]], None]) -> None:
        """Receive rows, and put them in their places, part by part. OSError, and no part is put, after the cut."""
        for part, memory in self._rows.parts(rows):
            receive(memory)
            with self._lock:
                if self._is_cut:
                    raise OSError("it was cut off")
                self._rows.write(part, memory)

    def cut(self) -> None:
        """End the connection, and put nothing more into rows; blocks while a part is being put."""
        with self._lock:
            self._is_cut = True
        self.framed.close()


class Receiver:
    """Listens for writers; a thread for each of them puts what it sends into rows of the region."""

    def __init__(self, rows: HostRows, meeting: Meeting) -> None:
        self._rows = rows
        self._meeting = meeting
        self._region_id = secrets.token_bytes(REGION_BYTES)  # a later process may listen where this one did
        family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
        self._listener = socket.create_server((meeting.host, 0), family=family, backlog=MAX_WRITERS)
        self._writers: dict[Writer, threading.Thread] = {}
        self._gone: OrderedDict[Peer, None] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="collective listener", daemon=True)
        self._thread.start()

    @property
    def metadata(self) -> bytes:
        host = self._meeting.advertised or self._meeting.host
        return self._region_id + f"{host}:{self._listener.getsockname()[1]}".encode()

    def cut(self, peer: Peer) -> None:
        """End the connections of a process and refuse it from now on; blocks while bytes of it are put into pages."""
        with self._lock:
            self._gone[peer] = None
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
            ended = [writer for writer in self._writers if writer.peer == peer]
        for writer in ended:
            writer.cut()

    def close(self) -> None:
        """Accept no more writers, and cut those there are. What is under way into unstaged rows may land."""
        with self._lock:
            self._closed.set()
            writers = dict(self._writers)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for writer in writers:
            writer.cut()
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
                logger.warning("a writer cannot be accepted: %s", error)  # it has gone, or no file is left for it
                self._closed.wait(NEXT_ACCEPT_S)
                continue
            writer = Writer(Framed(connected), self._rows)
            thread = threading.Thread(target=self._serve, args=(writer,), name=f"writer {address}", daemon=True)
            if not self._start(writer, thread):
                writer.framed.close()

    def _start(self, writer: Writer, thread: threading.Thread) -> bool:
        """Start a writer's thread; return False if there is no room, or no thread left, for another one."""
        with self._lock:
            if self._closed.is_set() or not self._has_room():
                return False
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("a writer cannot be accepted: %s", error)
                return False
            self._writers[writer] = thread
            return True

    def _has_room(self) -> bool:
        """Return whether there is room for another writer. If full, close the oldest one that has not proved itself."""
        if len(self._writers) < MAX_WRITERS:
            return True
        stranger = next((writer for writer in self._writers if writer.peer is None), None)
        if stranger is None:
            return False
        del self._writers[stranger]
        stranger.framed.close()
        return True

    def _serve(self, writer: Writer) -> None:
        framed = writer.framed
        try:
            self._accept(writer, be_greeted(framed, self._meeting.secret, self._region_id))
            self._receive(writer, meet(framed, READER))
        except (OSError, RuntimeError, ValueError) as error:
            logger.debug("a writer has gone: %s", error)
        finally:
            framed.close()
            with self._lock:
                self._writers.pop(writer, None)

    def _accept(self, writer: Writer, peer: Peer) -> None:
        """Note who a writer is; OSError for one that may not write here."""
        with self._lock:
            if peer in self._gone:
                raise OSError(f"{peer} is known to have ended")
            if writer not in self._writers:
                raise OSError("it was closed to make room for another one")
            writer.peer = peer

    def _receive(self, writer: Writer, pair: Pair) -> None:
        while True:
            pages = np.frombuffer(writer.framed.receive(4 * MAX_SLICE_PAGES), ">u4")
            if pages.max(initial=0) >= len(self._rows):
                raise OSError(f"page {pages.max()} is named, there are {len(self._rows)}")
            writer.put(pages.tolist(), pair.receive)
            writer.framed.send_byte()
