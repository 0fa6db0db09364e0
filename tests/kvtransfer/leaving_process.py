"""A process that writes to itself, closes both ends, and leaves at once, with what they were made of still there."""

import queue

import numpy as np

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.backends.pairing import Meeting
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))

WRITER, TARGET = (Peer(WorkerId(name), Incarnation(1)) for name in ("writer", "target"))
STOPPED: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
MOVERS = [
    Mover(CollectiveBackend(WRITER, Region.of(np.ones((2, 4096), np.uint8)), Meeting(b"s" * 32)), STOPPED.put),
    Mover(CollectiveBackend(TARGET, Region.of(np.zeros((2, 4096), np.uint8)), Meeting(b"s" * 32)), STOPPED.put),
]


def main() -> None:
    writer, receiver = MOVERS
    writer.attach(TARGET, receiver.describe())
    writer.write(TARGET, HANDOFF, (PageId(0),), (PageId(1),))
    assert STOPPED.get(timeout=20).event.digests is not None
    writer.close()
    receiver.close()


if __name__ == "__main__":
    main()
