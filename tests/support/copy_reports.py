"""Takes what a mover reports of copies, in its order."""

import queue

from pdserve.kvtransfer.sender import CopyStopped
from pdserve.kvtransfer.session import HandoffKey, Peer


class CopyReports(queue.SimpleQueue[CopyStopped]):
    def take_in(self, peer: Peer, handoff: HandoffKey, stopped: CopyStopped) -> None:
        self.put(stopped)


def ignore(peer: Peer, handoff: HandoffKey, stopped: CopyStopped) -> None:
    """For movers that only receive."""
