"""Which bytes of a page each rank of a sender writes into the memory of which rank of a receiver. Decides; does no I/O.

Invariant: together, the ranks of a sender write each byte of each page once, into the memory of each rank of the
receiver that holds it.

A page is a run of bytes for each KV head and layer: the head's K, then its V. A rank that has memory of its own holds
the runs of its share, in the order `[kv_head][layer]`, and no others. So neighbouring heads are one run of bytes where
all layers are meant, and neighbouring layers of one head always are.

Several ranks may hold a copy of the same runs: latent rows, which all heads share, and KV heads where there are fewer
than ranks. Of these runs each of a sender's ranks sends an even part of the layers, to all ranks that hold a copy. So
what a receiver's ranks get, and the digest of it, comes from the same ranks of the sender.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from pdserve.base.errors import ProtocolError
from pdserve.base.values import value

Span = tuple[int, int]  # the first one, and the one behind the last


@value
class Share:
    """What a rank holds of every page: some of the model's layers, and some KV heads of each."""

    layers: Span
    heads: Span
    copy: int = 0  # which of the ranks that hold the same it is
    num_copies: int = 1

    @property
    def sent(self) -> "Share":
        """Return the part of it that this rank sends, and counts in digests; at least a layer if there are as many."""
        first, end = (self.layers[0] + copy * self.num_layers // self.num_copies for copy in (self.copy, self.copy + 1))
        return Share((first, end), self.heads)

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_runs(self) -> int:
        return self.num_layers * self.num_heads

    def run_numbers(self, whole: "Share") -> tuple[int, ...]:
        """Return of each run which one of a whole page it is. It is the same on whichever rank the run lies."""
        return tuple([layer * whole.num_heads + head for head in range(*self.heads) for layer in range(*self.layers)])

    def common(self, other: "Share") -> "Share | None":
        """Return what two ranks both hold, in whichever copy."""
        layers, heads = _common(self.layers, other.layers), _common(self.heads, other.heads)
        return None if layers is None or heads is None else Share(layers, heads)


def _common(one: Span, other: Span) -> Span | None:
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else None


def whole_of(shares: Sequence[Share]) -> Share:
    """Return all that the ranks of a worker hold together."""
    return Share((0, max([each.layers[1] for each in shares])), (0, max([each.heads[1] for each in shares])))


def check_shares(shares: Sequence[Share], whole: Share) -> None:
    """Raise ProtocolError unless there are as many copies of each run of a page, each of which one rank holds."""
    numbers = sorted({share.copy for share in shares})
    copies = [[share for share in shares if share.copy == number] for number in numbers]
    is_alike = all(share.num_copies == len(numbers) for share in shares) and numbers == list(range(len(numbers)))
    if not is_alike or not all(_is_whole(copy, whole) for copy in copies):
        raise ProtocolError("mover_metadata: its ranks do not hold each layer and KV head once, or once in each copy")


def _is_whole(shares: Sequence[Share], whole: Share) -> bool:
    parts = [share.common(whole) for share in shares]
    holds = all(part is not None and part.num_runs == share.num_runs for part, share in zip(parts, shares, strict=True))
    is_shared = any(one.common(other) for one, other in combinations(shares, 2))
    return holds and not is_shared and sum([share.num_runs for share in shares]) == whole.num_runs


@value
class Rows:
    """Where a part of each page lies in one rank's memory: in rows of one length, at one distance."""

    offset: int  # bytes from the first page to its first row
    length: int  # bytes
    stride: int  # bytes from row to row, also from the last one of a page to the first one of the next page
    per_page: int
    first: int  # of a page's rows, the first one that is meant
    count: int  # and how many follow it, itself included


@value
class Route:
    """The part of each page that goes from one rank to another one; as many rows, of one length, at both."""

    source: Rows
    target: Rows

    @property
    def ends(self) -> tuple[Rows, Rows]:
        return self.source, self.target

    @property
    def page_bytes(self) -> int:
        return self.source.length * self.source.count


def routes(source: Share, targets: Sequence[Share], run_bytes: int) -> Iterator[tuple[int, Route]]:
    """Yield each rank of a receiver, by its number, that gets something from one rank of a sender."""
    for number, target in enumerate(targets):
        part = source.sent.common(target)
        if part is not None:
            is_row = part.layers == source.layers == target.layers  # then neighbouring heads are one run
            yield number, Route(*[_rows(share, part, run_bytes, is_row=is_row) for share in (source, target)])


def _rows(share: Share, part: Share, run_bytes: int, *, is_row: bool) -> Rows:
    stride, per_page = share.num_layers * run_bytes, share.num_heads
    first, count = part.heads[0] - share.heads[0], part.num_heads
    if is_row:
        return Rows(first * stride, count * stride, per_page * stride, 1, 0, 1)
    offset = (part.layers[0] - share.layers[0]) * run_bytes
    return Rows(offset, part.num_layers * run_bytes, stride, per_page, first, count)
