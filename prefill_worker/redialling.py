"""Which receivers are dialled again: pages that they granted stay quarantined until this process answers.

Invariant: a peer is dialled again for REDIAL_S at most after its stream was lost, however many tries fail, until its
stream stands again or a router names it again.
"""

from collections import OrderedDict

from pdserve.kvtransfer.doors import Connect, Result
from pdserve.kvtransfer.session import Peer

REDIAL_S = 600.0
MAX_ADDRESSES = 1024


class Redialling:
    """Addresses of the peers met of late, and which of their streams are lost."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[Peer, str] = OrderedDict()
        self._lost_s: dict[Peer, float] = {}  # since when, until the stream stands again
        self._due: dict[Peer, None] = {}  # to be dialled at the next tick

    def named(self, peer: Peer, address: str) -> Connect:
        """Return how to reach a peer that a router has named: it lives, as far as the router knows."""
        self._addresses[peer] = address
        self._addresses.move_to_end(peer)
        self._stop(peer)
        if len(self._addresses) > MAX_ADDRESSES:
            self.forget(next(iter(self._addresses)))
        return Connect(peer, address)

    def attached(self, peer: Peer) -> None:
        self._stop(peer)

    def lose(self, peer: Peer, now_s: float) -> None:
        """Note that a stream has ended, or could not be had."""
        if peer in self._addresses:
            self._lost_s.setdefault(peer, now_s)
            self._due[peer] = None

    def forget(self, peer: Peer) -> None:
        self._addresses.pop(peer, None)
        self._stop(peer)

    def dial(self, now_s: float) -> list[Result]:
        due, self._due = self._due, {}
        commands: list[Result] = []
        for peer in due:
            if now_s - self._lost_s[peer] < REDIAL_S:
                commands.append(Connect(peer, self._addresses[peer]))
            else:
                self.forget(peer)
        return commands

    def _stop(self, peer: Peer) -> None:
        self._lost_s.pop(peer, None)
        self._due.pop(peer, None)
