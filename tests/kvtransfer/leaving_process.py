"""A process that writes to itself, closes both ends, and leaves at once, with what they were made of still there."""

import queue

import numpy as np

from pdserve.ids import Attempt, Incarnation, PageId, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.backends.pairing import Meeting
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.sender import CopyStopped
from pdserve.kvtransfer.session import HandoffKey, Peer

HANDOFF = HandoffKey(RequestId(bytes(16)), Attempt(0))

WRITER, TARGET = (Peer(WorkerId(name), Incarnation(1)) for name in ("writer", "target"))
STOPPED: queue.SimpleQueue[CopyStopped] = queue.SimpleQueue()
MOVERS = [
    Mover(
        CollectiveBackend(me, Region.of(np.full((2, 4096), 7, np.uint8)), Meeting(b"s" * 32)),
        lambda peer, key, event: STOPPED.put(event),
    )
    for me in (WRITER, TARGET)
]


def main() -> None:
    writer, receiver = MOVERS
    writer.attach(TARGET, receiver.describe())
    writer.write(TARGET, HANDOFF, (PageId(0),), (PageId(1),))
    assert STOPPED.get(timeout=20).digests is not None
    writer.close()
    receiver.close()


if __name__ == "__main__":
    main()
