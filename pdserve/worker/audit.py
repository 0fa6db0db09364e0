"""Compares who has pages with what is going on. Pure.

Invariant: each page that is not free belongs to something that is going on. A page that belongs to nothing is leaked;
one that something uses without holding it could be given out under it, which no worker may go on with.
"""

from collections import Counter
from collections.abc import Iterable

from pdserve.engine.pages import PagePool
from pdserve.errors import InvariantError
from pdserve.ids import PageId
from pdserve.kvtransfer.doors import Claim

EVERY_S = 10.0


def leaked_pages(pool: PagePool, claims: Iterable[Claim]) -> tuple[PageId, ...]:
    """Return the pages that nobody claims, or fewer than hold them; InvariantError where more claim than hold."""
    claims = tuple(claims)
    held = Counter(page for claim in claims for page in claim.held)
    granted = {page for claim in claims for page in claim.granted}
    quarantined = {page for claim in claims for page in claim.quarantined}
    leaked = []
    for page in map(PageId, range(pool.num_pages)):
        has = (pool.holders(page), int(pool.is_granted(page)), int(pool.is_quarantined(page)))
        claimed = (held[page], int(page in granted), int(page in quarantined))
        if any(more > fewer for more, fewer in zip(claimed, has, strict=True)):
            raise InvariantError(f"page {page}: held, granted, quarantined {has} times, and used {claimed} times")
        if claimed != has:
            leaked.append(page)
    return tuple(leaked)


def adds_up(pool: PagePool, claims: Iterable[Claim]) -> bool:
    """Return whether as many pages are claimed as are taken: cheap, however many pages there are."""
    claims = tuple(claims)
    claimed = (
        sum(len(claim.held) for claim in claims),
        sum(len(claim.granted) for claim in claims),
        sum(len(claim.quarantined) for claim in claims),
    )
    return claimed == (pool.num_holds, pool.num_granted, pool.num_quarantined)


class Auditor:
    """Looks for leaked pages every ten seconds, and whenever a worker has nothing to do but not all its pages.

    It looks at single pages only where their numbers do not add up.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._due_s = 0.0
        self.num_leaked = 0

    def look(self, claims: Iterable[Claim], now_s: float, *, idle: bool) -> None:
        """Count the leaked pages anew, if that is due."""
        if idle or now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            claims = tuple(claims)
            self.num_leaked = 0 if adds_up(self._pool, claims) else len(leaked_pages(self._pool, claims))
