"""Messages of receivers about hand-offs that are not open here: over, or not placed yet. Does no I/O.

Invariant: a grant kept here is taken by its placement, or answered with Quiesced after EARLY_GRANT_S, and never both;
nothing is said of a hand-off that ended in doubt.
"""

from collections import OrderedDict

from pdserve.kvtransfer.doors import ReceiverMessage, Result, ToReceiver
from pdserve.kvtransfer.session import Grant, HandoffKey, Peer, Quiesced, Withdrawn

EARLY_GRANT_S = 5.0  # how long a grant may wait for its placement
MAX_CLOSED = 4096

_Name = tuple[Peer, HandoffKey]


class EarlyGrants:
    """Grants that overtook their placements, and what is remembered of hand-offs that are over."""

    def __init__(self, max_early: int) -> None:
        self._max_early = max_early
        self._early: dict[_Name, tuple[float, ReceiverMessage]] = {}
        self._closed: OrderedDict[_Name, None] = OrderedDict()  # the last ones, to answer late grants at once
        self._in_doubt: dict[Peer, set[HandoffKey]] = {}  # into pages that late bytes may still reach

    def is_closed(self, peer: Peer, key: HandoffKey) -> bool:
        return (peer, key) in self._closed

    def close(self, peer: Peer, key: HandoffKey, *, in_doubt: bool = False) -> None:
        self._closed[peer, key] = None
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if in_doubt:
            self._in_doubt.setdefault(peer, set()).add(key)

    def take(self, peer: Peer, key: HandoffKey) -> ReceiverMessage | None:
        """Return the grant that overtook a placement, if one did; it is no longer kept."""
        _, said = self._early.pop((peer, key), (0.0, None))
        return said

    def handle(self, said: ReceiverMessage, now_s: float) -> list[Result]:
        """Answer what is said of a hand-off that is not open."""
        name = (said.peer, said.key)
        if isinstance(said.event, Grant) and name not in self._closed and len(self._early) < self._max_early:
            self._early[name] = (now_s, said)
            return []
        if not isinstance(said.event, Grant | Withdrawn):
            return []
        self._early.pop(name, None)
        if said.key in self._in_doubt.get(said.peer, ()):
            return []  # to say that it is quiescent would be a guess
        return [self._give_back(said, "unknown here")]

    def expire(self, now_s: float) -> list[Result]:
        """Give back early grants whose placement has not come."""
        expired = [said for since_s, said in self._early.values() if now_s - since_s > EARLY_GRANT_S]
        for said in expired:
            del self._early[said.peer, said.key]
        return [self._give_back(said, "never placed here") for said in expired]

    def lose(self, peer: Peer) -> None:
        """Drop the early grants of a peer whose stream has ended: it has withdrawn them."""
        self._early = {name: early for name, early in self._early.items() if name[0] != peer}

    def forget(self, peer: Peer) -> None:
        """Drop what is kept for a peer whose process has ended."""
        self.lose(peer)
        self._in_doubt.pop(peer, None)

    def _give_back(self, said: ReceiverMessage, reason: str) -> Result:
        """Answer for a hand-off that is not here, and will not be from now on."""
        self.close(said.peer, said.key)
        return ToReceiver(said.peer, said.key, Quiesced(reason))
