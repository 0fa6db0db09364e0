"""Moves pages with torch.distributed, point to point: gloo over TCP. For where NIXL cannot be had.

Two-sided: the receiver has to ask for each page, so it has a listener and a thread for each writer
(`collective_receiver.py`). Gloo takes memory of the host alone: pages of a GPU pass through it at both ends
(`staging.py`).
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pdserve.kvtransfer.backends.backend import Connection, Indices, PostError, TransferLostError
from pdserve.kvtransfer.backends.collective_receiver import Receiver
from pdserve.kvtransfer.backends.pairing import REGION_BYTES, WRITER, Framed, Greeting, Meeting, Pair, greet, meet
from pdserve.kvtransfer.backends.staging import HostRows
from pdserve.kvtransfer.region import Description, Region
from pdserve.kvtransfer.session import Peer

CONNECT_TIMEOUT_S = 5.0


class CollectiveBackend:
    """Writes through gloo, and receives what other writers send."""

    name = "collective"
    carrier = "tcp"

    def __init__(self, me: Peer, region: Region, meeting: Meeting, *, staged: bool = False) -> None:
        """`staged`: pages pass through other memory of the host, as those of a GPU always do."""
        self.region = region
        self._me = me
        self._secret = meeting.secret
        pages, probe = torch.as_tensor(region.view), torch.as_tensor(region.probe)
        self._rows = HostRows(pages, probe, staged=staged or region.gpu is not None)
        self._receiver = Receiver(self._rows, meeting)
        self.metadata = self._receiver.metadata

    def connect(self, description: Description) -> Connection:
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
            return _Connection(self._rows, framed, meet(framed, WRITER))
        except (OSError, RuntimeError) as error:
            framed.close()
            raise PostError(f"{host}:{port}: {error}") from error

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
