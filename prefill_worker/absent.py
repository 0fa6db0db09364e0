"""Hand-offs that peers speak of and that are not in a prefill worker's table: over, or not placed yet. Does no I/O.

Invariant: a grant kept here is taken by its placement, or answered with Quiesced after EARLY_GRANT_S, and never both;
nothing is said of a hand-off that ended in doubt.
"""

from collections import OrderedDict

from pdserve.kvtransfer import sender
from pdserve.kvtransfer.session import HandoffKey, Peer
from pdserve.prefill_worker.events import Command, FromPeer, ToPeer

EARLY_GRANT_S = 5.0  # how long a grant may wait for its placement
MAX_CLOSED = 4096

_Name = tuple[Peer | None, HandoffKey]


class Absent:
    """Early grants, and what is remembered of hand-offs that are over."""

    def __init__(self, max_early: int) -> None:
        self._max_early = max_early
        self._early: dict[_Name, tuple[float, FromPeer]] = {}
        self._closed: OrderedDict[_Name, None] = OrderedDict()  # the last ones, to answer late grants at once
        self._in_doubt: dict[Peer, set[HandoffKey]] = {}  # into pages that late bytes may still reach

    def is_closed(self, peer: Peer | None, key: HandoffKey) -> bool:
        return (peer, key) in self._closed

    def close(self, peer: Peer | None, key: HandoffKey, *, in_doubt: bool = False) -> None:
        """Note that a hand-off is over."""
        self._closed[peer, key] = None
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if in_doubt and peer is not None:
            self._in_doubt.setdefault(peer, set()).add(key)

    def take_early(self, peer: Peer | None, key: HandoffKey) -> FromPeer | None:
        """Return the grant that overtook this placement, if one did; it is no longer kept."""
        _, news = self._early.pop((peer, key), (0.0, None))
        return news

    def hear(self, news: FromPeer, now_s: float) -> list[Command]:
        """Answer news of a hand-off that is not in the table. ProtocolError changes nothing."""
        name = (news.peer, news.key)
        if isinstance(news.event, sender.Granted):
            sender.check(news.event.grant)
            if name not in self._closed and len(self._early) < self._max_early:
                self._early[name] = (now_s, news)
                return []
        if not isinstance(news.event, sender.Granted | sender.Withdrawn):
            return []
        self._early.pop(name, None)
        if news.key in self._in_doubt.get(news.peer, ()):
            return []  # to say that it is quiescent would be a guess
        return [self._give_back(news, "unknown here")]

    def expire(self, now_s: float) -> list[Command]:
        """Give back early grants whose placement has not come."""
        expired = [news for since_s, news in self._early.values() if now_s - since_s > EARLY_GRANT_S]
        for news in expired:
            del self._early[news.peer, news.key]
        return [self._give_back(news, "never placed here") for news in expired]

    def lose(self, peer: Peer) -> None:
        """Drop the early grants of a peer whose stream has ended: it has withdrawn them."""
        self._early = {name: early for name, early in self._early.items() if name[0] != peer}

    def forget(self, peer: Peer) -> None:
        """Drop what is kept for a peer whose process has ended."""
        self.lose(peer)
        self._in_doubt.pop(peer, None)

    def _give_back(self, news: FromPeer, reason: str) -> Command:
        """Answer for a hand-off that is not here, and will not be from now on."""
        self.close(news.peer, news.key)
        return ToPeer(news.peer, news.key, sender.SendQuiesced(reason))
