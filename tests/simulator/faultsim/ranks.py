"""Ranks with memory of their own in virtual time: which runs of a page each of them writes, and to which rank.

A page is taken for the runs of some layers and KV heads. A rank has the runs of its share, one head after the other.
"""

from collections.abc import Iterator, Sequence
from zlib import crc32

from pdserve.kvtransfer.routes import Route, Rows, Share, routes
from pdserve.kvtransfer.session import of_parts

LAYERS, HEADS = 2, 4
WHOLE = Share((0, LAYERS), (0, HEADS))
ONE_RANK = (WHOLE,)
BY_HEADS = (Share((0, LAYERS), (0, 1)), Share((0, LAYERS), (1, 4)))
BY_LAYERS = (Share((1, 2), (0, HEADS)), Share((0, 1), (0, HEADS)))  # the first rank is the last stage
BY_EACH_HEAD = tuple([Share((0, LAYERS), (head, head + 1)) for head in range(HEADS)])
COPIES = tuple([Share((0, LAYERS), (0, HEADS), copy, 2) for copy in range(2)])
COPIES_BY_HEADS = tuple([Share((0, LAYERS), heads, copy, 2) for heads in ((0, 3), (3, 4)) for copy in range(2)])
DIVIDED = (ONE_RANK, BY_HEADS, BY_LAYERS, BY_EACH_HEAD, COPIES, COPIES_BY_HEADS)

Piece = tuple[int, bytes]  # where in a page it goes, and what it is


def pieces(content: bytes, source: Share, targets: Sequence[Share]) -> Iterator[Piece]:
    """Yield what one rank of a sender writes of a page, in the order of its routes."""
    run_bytes = len(content) // WHOLE.num_runs
    for number, route in routes(source, targets, 1):
        yield from _along(route, (source, targets[number]), content, run_bytes)


def _along(route: Route, ends: tuple[Share, Share], content: bytes, run_bytes: int) -> Iterator[Piece]:
    for here, there in zip(_runs(route.source, ends[0]), _runs(route.target, ends[1]), strict=True):
        yield there * run_bytes, content[here * run_bytes : (here + 1) * run_bytes]


def _runs(rows: Rows, share: Share) -> list[int]:
    """Return which runs of a whole page a route names, in a rank's memory whose runs have one byte."""
    numbers = _held(share)
    firsts = [rows.offset + row * rows.stride for row in range(rows.first, rows.first + rows.count)]
    return [numbers[first + place] for first in firsts for place in range(rows.length)]


def digest(content: bytes, shares: Sequence[Share]) -> int:
    """Return the digest of what some ranks have of a page; of several copies, each of which lies here, that of one."""
    return of_parts([(_of_rank(content, share),) for share in shares if share.copy == 0])[0]


def digest_of_sent(content: bytes, share: Share) -> int:
    """Return the digest of what a rank sends of a page."""
    return _of_rank(content, share.sent)


def _of_rank(content: bytes, share: Share) -> int:
    run_bytes, held = len(content) // WHOLE.num_runs, _held(share)
    seeds = share.run_numbers(WHOLE)
    runs = [content[run * run_bytes : (run + 1) * run_bytes] for run in held]
    return sum([crc32(run, crc32(b"%d" % seed)) << 20 for run, seed in zip(runs, seeds, strict=True)])


def _held(share: Share) -> list[int]:
    """Return which runs of a page lie in a rank's memory. It does not ask the code that is tried."""
    return [layer * HEADS + head for head in range(*share.heads) for layer in range(*share.layers)]
