"""Moves pages with torch.distributed, point to point: gloo over TCP. For where NIXL cannot be had.

Gloo is two-sided: the receiver has to ask for each page, so it has a listener and a thread for each writer. Gloo takes
memory of the host alone: pages of a GPU pass through it at both ends (`staging.py`).

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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.base.ids import Peer
from pdserve.kvtransfer.backends.backend import Connection, Indices, PostError, TransferLostError, Way
from pdserve.kvtransfer.backends.pairing import (
    READER,
    REGION_BYTES,
    WRITER,
    Framed,
    Greeting,
    Meeting,
    Pair,
    be_greeted,
    greet,
    meet,
)
from pdserve.kvtransfer.backends.staging import HostRows, Rows
from pdserve.kvtransfer.region import Region

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_WRITERS = 256  # those that have yet to prove themselves included
MAX_GONE = 4096  # ended processes that are remembered, and refused
MAX_SLICE_PAGES = 1 << 20
NEXT_ACCEPT_S = 0.1  # after a failure: files or threads may be free again by then
LEAVE_S = 1.0  # for writers' threads at the end; one that waits for a frozen writer is left behind


class CollectiveBackend:
    """Writes through gloo, and receives what other writers send."""

    name = "collective"
    carrier = "tcp"

    def __init__(self, me: Peer, region: Region, meeting: Meeting, *, staged: bool = False) -> None:
        """`staged`: pages pass through other memory of the host, as those of a GPU always do."""
        self.region = region
        self._me = me
        self._secret = meeting.secret
        self._is_staged = staged
        self._receiver = Receiver(self._rows_of(region), meeting)
        self.metadata = self._receiver.metadata

    def begin(self) -> None:
        """Do nothing: writers' threads need no preparation."""

    def progress(self) -> None:
        """Do nothing: each writer has a thread here."""

    def connect(self, way: Way, source: Region) -> Connection:
        assert way.route is None, "settings refuse ranks with memory of their own"
        description = way.there
        region, address = description.metadata[:REGION_BYTES], description.metadata[REGION_BYTES:]
        host, _, port = address.decode(errors="replace").rpartition(":")
        if not host or not port.isdigit():
            raise PostError("it does not name where it listens")
        try:
            framed = Framed(socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S))
        except OSError as error:
            raise PostError(f"{host}:{port}: {error}") from error
        try:
            greet(framed, self._secret, Greeting(region, self._me))
            return _Connection(self._rows_of(source), framed, meet(framed, WRITER))
        except (OSError, RuntimeError) as error:
            framed.close()
            raise PostError(f"{host}:{port}: {error}") from error

    def _rows_of(self, region: Region) -> HostRows:
        pages, probe = torch.as_tensor(region.view), torch.as_tensor(region.probe)
        return HostRows(pages, probe, staged=self._is_staged or region.gpu is not None)

    def cut(self, peer: Peer) -> None:
        self._receiver.cut(peer)

    def close(self, *, in_flight: bool) -> None:
        del in_flight  # gloo keeps what it sends
        self._receiver.close()


class _Connection:
    """A receiver, which answers with one byte for each slice that is in its place."""

    def __init__(self, rows: HostRows, framed: Framed, pair: Pair) -> None:
        self._rows = rows
        self._framed = framed
        self._pair = pair
        self._num_posted = 0  # slices
        self._num_landed = 0
        self._lost = ""  # why nothing more will land

    def post(self, src: Indices, dst: Indices) -> "_Transfer":
        rows = self._read(src.tolist())
        try:
            self._framed.send(dst.astype(">u4").tobytes())
            works = self._pair.send(rows)
        except (OSError, RuntimeError) as error:
            self.close()
            raise TransferLostError(str(error)) from error
        self._num_posted += 1
        return _Transfer(self, self._num_posted, works)

    def has_landed(self, number: int) -> bool:
        if not self._lost and number > self._num_landed:
            try:
                self._num_landed += self._framed.count_bytes()
            except OSError as error:
                self._lost = str(error)
        if number <= self._num_landed:
            return True
        if self._lost:
            raise TransferLostError(self._lost)
        return False

    def close(self) -> None:
        self._lost = self._lost or "the connection was closed here"
        self._framed.close()

    def _read(self, pages: list[int]) -> Sequence[Tensor]:
        try:
            return self._rows.read(pages)
        except RuntimeError as error:
            raise PostError(str(error)) from error


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    _connection: _Connection
    _number: int  # of the connection's slices, from 1 on: they land in their order
    _works: tuple[c10d.Work, ...]  # kept until they have landed

    def has_landed(self) -> bool:
        return self._connection.has_landed(self._number)


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
                logger.warning("a writer cannot be accepted: %s", error)  # it has gone, or there is no file left
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
