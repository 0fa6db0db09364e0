"""Which workers hold which prefixes: what they report, and what was routed to them, for a while. Pure.

Invariant: a page that a worker reported counts as held until that worker reports it as removed. What was routed is
forgotten by itself: after its time, or when it is more than the worker can hold.

What was routed is a guess. A worker that reports its pages corrects it soon; the guess about one that does not is
believed for longer.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from pdserve.perfmodel.model import LATELY_S
from pdserve.protocol.kvlayout import Tier
from pdserve.protocol.prefix_hash import CacheScope, PrefixHasher, short_hashes
from pdserve.router.requests.events import KvChanged, LinkId

# Of what was routed to a worker that reports nothing. One that reports has done so within LATELY_S, or never will.
LIFE_S = 600.0
MAX_PAGES = 1 << 20  # of one worker; more are not looked at

Hashes = tuple[int, ...]  # of a prompt's full blocks, 64 bits each
UNKEYED = PrefixHasher(b"", "")  # of a router whose workers report nothing


def block_hashes(hasher: PrefixHasher, token_ids: Seq[int], scope: CacheScope) -> Hashes:
    return tuple(short_hashes(b"".join(hasher.extend(hasher.root(scope), token_ids))))


@dataclass(slots=True, eq=False)
class _Worker:
    page_blocks: int  # blocks in a page
    max_pages: int
    routed: OrderedDict[int, float] = field(default_factory=OrderedDict)  # until when; the least used first
    reported: set[int] = field(default_factory=set)
    reports: bool = False

    def num_leading(self, pages: Hashes, now_s: float) -> int:
        """Return how many of a prompt's leading pages it holds."""
        reported, routed = self.reported, self.routed
        number = len(list(takewhile(reported.__contains__, pages)))
        if routed:
            while number < len(pages) and (pages[number] in reported or routed.get(pages[number], -inf) >= now_s):
                number += 1
        return number


class PrefixIndex:
    """The pages that each worker is taken to hold, by their hashes."""

    def __init__(self, hasher: PrefixHasher) -> None:
        self.hasher = hasher
        self._workers: dict[LinkId, _Worker] = {}

    def attach(self, link: LinkId, page_size: int, num_pages: int) -> None:
        """Note a worker's pages. Nothing is known of pages that are no multiple of a block."""
        page_blocks, rest = divmod(page_size, self.hasher.block_tokens)
        if page_blocks and not rest:
            self._workers.setdefault(link, _Worker(page_blocks, min(num_pages, MAX_PAGES)))

    def note(self, links: Iterable[LinkId], hashes: Hashes, now_s: float) -> None:
        """Note that these workers will hold a prompt with these blocks."""
        for link in links:
            worker = self._workers.get(link)
            if worker is None:
                continue
            routed, until_s = worker.routed, now_s + (LATELY_S if worker.reports else LIFE_S)
            for page in reversed(_pages(hashes, worker.page_blocks)):  # a prefix is kept longer than what it leads to
                routed[page] = until_s
                routed.move_to_end(page)
            while len(routed) > worker.max_pages:
                routed.popitem(last=False)

    def apply(self, change: KvChanged) -> None:
        worker = self._workers.get(change.link)
        if worker is None or change.tier is not Tier.DEVICE:
            return  # a match means pages that are of use at once
        worker.reports = True
        worker.reported.difference_update(change.removed)
        for page in change.removed:
            worker.routed.pop(page, None)
        if len(worker.reported) + len(change.stored) <= MAX_PAGES:
            worker.reported.update(change.stored)

    def match(self, hashes: Hashes, now_s: float) -> dict[LinkId, int]:
        """Return how many leading tokens of these blocks each worker holds; workers that hold none are left out."""
        found, pages_of = dict[LinkId, int](), dict[int, Hashes]()
        for link, worker in self._workers.items():
            blocks = worker.page_blocks
            pages = pages_of.get(blocks)
            if pages is None:
                pages = pages_of[blocks] = _pages(hashes, blocks)
            if not pages or (pages[0] not in worker.reported and pages[0] not in worker.routed):
                continue  # so it is with most workers
            number = worker.num_leading(pages, now_s)
            if number:
                found[link] = number * blocks * self.hasher.block_tokens
        return found

    def reported(self, link: LinkId, hashes: Hashes) -> int:
        """Return how many leading tokens of these blocks a worker has reported to hold."""
        worker = self._workers.get(link)
        if worker is None or not worker.reported:
            return 0
        pages = takewhile(worker.reported.__contains__, _pages(hashes, worker.page_blocks))
        return len(list(pages)) * worker.page_blocks * self.hasher.block_tokens

    def forget(self, link: LinkId) -> None:
        self._workers.pop(link, None)


def _pages(hashes: Hashes, page_blocks: int) -> Hashes:
    """Return the hashes of a prompt's full pages: those of their last blocks."""
    return hashes[page_blocks - 1 :: page_blocks]
