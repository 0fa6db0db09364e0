"""Which peers keep their leases. Decides; does no I/O.

Invariant: a peer's lease lapses only when nothing was received from it for `lease_s` of the time in which this process
was awake. That proves nothing about its writes: what was granted to it stays quarantined.
"""

from pdserve.kvtransfer.session import Peer


class Leases:
    """The leases of all attached peers: each message of a peer renews its lease."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._received_s: dict[Peer, float] = {}  # of peers whose lease runs
        self._lapsed: set[Peer] = set()  # attached, but silent

    def begin(self, peer: Peer, now_s: float) -> None:
        """Begin the lease of a peer that has attached."""
        self._lapsed.discard(peer)
        self._received_s[peer] = now_s

    def renew(self, peer: Peer, now_s: float) -> bool:
        """Renew the lease of an attached peer, of which a message has arrived; return whether it had lapsed."""
        is_back = peer in self._lapsed
        if is_back or peer in self._received_s:
            self.begin(peer, now_s)
        return is_back

    def holds(self, peer: Peer) -> bool:
        """Return whether a peer may be granted pages: it is attached, and not silent."""
        return peer in self._received_s

    def end(self, peer: Peer) -> None:
        """Drop the lease of a peer whose stream, or process, has ended."""
        self._received_s.pop(peer, None)
        self._lapsed.discard(peer)

    def excuse(self, asleep_s: float, now_s: float) -> None:
        """Extend all leases by a time in which this process could receive nothing."""
        for peer, received_s in self._received_s.items():
            self._received_s[peer] = min(received_s + asleep_s, now_s)

    def take_lapsed(self, now_s: float) -> tuple[tuple[Peer, str], ...]:
        """End the leases that have lapsed; return whose they were and why. A later message renews them."""
        silent = [(peer, now_s - received_s) for peer, received_s in self._received_s.items()]
        lapsed = [(peer, silent_s) for peer, silent_s in silent if silent_s >= self.lease_s]
        for peer, _ in lapsed:
            del self._received_s[peer]
            self._lapsed.add(peer)
        return tuple((peer, f"lease of {self.lease_s:g} s lapsed: silent for {s:.1f} s") for peer, s in lapsed)
