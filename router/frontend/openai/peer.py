"""Whether the other end of a connection still reads, by what TCP knows of it.

What waits in this process says little: kernels hold megabytes, and a receiver whose window was full opens it again only
once tens of kilobytes were read, which takes minutes where a few hundred bytes a second are. Linux alone is asked;
elsewhere each peer counts as one that reads.
"""

import socket
import struct

STALLED_S = 300.0  # in which a peer has to take something of what waits for it
GONE_S = 30.0  # since a peer's last word, where it answers neither data nor probes
MAX_UNANSWERED = 2  # of either: a first one may be on its way
TCP_INFO = getattr(socket, "TCP_INFO", None)
# struct tcp_info: retransmits, probes, last_ack_recv in ms, bytes_acked, notsent_bytes
INFO = struct.Struct("=2xBB52xI60xQ16xI")


class Peer:
    """One connection's."""

    def __init__(self, tcp: socket.socket | None, now_s: float) -> None:
        self._tcp = tcp if TCP_INFO is not None else None
        self._num_taken = 0
        self._taken_s = now_s
        self.has_all = True  # that was written, as far as this kernel could send it
        self.is_done = False  # it had all at the last two looks, and took nothing between them

    def reads(self, now_s: float) -> bool:
        """Look at it. False where it is gone, or has taken nothing of what has waited for it for STALLED_S."""
        if self._tcp is None or TCP_INFO is None:
            return True
        try:
            info = self._tcp.getsockopt(socket.IPPROTO_TCP, TCP_INFO, INFO.size)
        except OSError:  # this end is closed, and its protocol does not know yet
            return False
        if len(info) < INFO.size:
            return True
        num_sent_again, num_probes, silent_ms, num_taken, num_unsent = INFO.unpack(info)
        had_all, self.has_all = self.has_all, not num_unsent
        self.is_done = had_all and self.has_all and num_taken == self._num_taken
        if self.has_all or had_all or num_taken > self._num_taken:
            self._num_taken, self._taken_s = num_taken, now_s
        is_gone = max(num_sent_again, num_probes) >= MAX_UNANSWERED and silent_ms >= GONE_S * 1e3
        return not is_gone and now_s - self._taken_s < STALLED_S
