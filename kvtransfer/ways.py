"""The ways from one rank's memory into that of a peer, whose ranks may have memory of their own each.

Invariant: a slice has landed when it has on each of its ways. If it fails on one, it has ended when it has on all.
"""

from collections.abc import Sequence

from pdserve.base.errors import ProtocolError
from pdserve.kvtransfer.backends.backend import (
    Backend,
    Connection,
    Indices,
    PostError,
    Transfer,
    TransferLostError,
    Way,
)
from pdserve.kvtransfer.region import Description, Region, decode_ranks
from pdserve.kvtransfer.routes import routes

MAX_ROWS = 1 << 31  # libraries count them in 32 bits


def ways_to(description: bytes, region: Region, sent_bytes: int) -> tuple[Way, ...]:
    """Return how pages of a region reach a peer; ProtocolError if its description does not fit.

    sent_bytes: of a page, as it is sent.
    """
    if region.share is None:
        there = Description.decode(description)
        if there.page_bytes != sent_bytes:
            raise ProtocolError(f"page_bytes: {there.page_bytes} there, {sent_bytes} here")
        return (Way(there),)
    parts, run_bytes = decode_ranks(description), sent_bytes // region.share.num_runs
    for share, there in parts:
        if there.page_bytes != share.num_runs * run_bytes:
            raise ProtocolError(f"page_bytes: {there.page_bytes} of {share}, whose runs have {run_bytes} here")
    found = routes(region.share, [share for share, _ in parts], run_bytes)
    ways = tuple([Way(parts[number][1], route) for number, route in found])
    ends = [region.description(), *[there for _, there in parts]]
    most_pages = max([end.num_pages + end.num_probe_pages for end in ends])
    if most_pages * max([rows.per_page for way in ways if way.route for rows in way.route.ends], default=1) >= MAX_ROWS:
        raise ProtocolError(f"num_pages: {most_pages} have more rows than can be named")
    return ways


def connect(backend: Backend, ways: Sequence[Way], source: Region) -> Connection:
    """Prepare writes on all ways; PostError if one of them cannot be had."""
    joined = _Joined()
    try:
        for way in ways:
            joined.add(backend.connect(way, source))
    except PostError:
        joined.close()
        raise
    return joined if len(ways) > 1 else joined.connections[0]


class _Joined:
    """Several connections as one."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        self.connections.append(connection)

    def post(self, src: Indices, dst: Indices) -> Transfer | None:
        under_way: list[Transfer] = []
        for connection in self.connections:
            try:
                transfer = connection.post(src, dst)
            except PostError as error:
                if not under_way:
                    raise
                return _Several(under_way, error)
            if transfer is not None:
                under_way.append(transfer)
        return _Several(under_way) if under_way else None

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


class _Several:
    """A slice on its ways."""

    def __init__(self, transfers: Sequence[Transfer], error: PostError | None = None) -> None:
        """error: why the slice has failed already."""
        self._left, self._error = transfers, error

    def has_landed(self) -> bool:
        left: list[Transfer] = []
        for transfer in self._left:
            try:
                if not transfer.has_landed():
                    left.append(transfer)
            except PostError as error:
                if self._error is None or isinstance(error, TransferLostError):
                    self._error = error
        self._left = left
        if not left and self._error is not None:
            raise self._error
        return not left
