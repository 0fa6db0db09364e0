"""A process that writes into pages until it is killed: `writer_process.py DESCRIPTION PAGES PAGE_BYTES`."""

import queue
import sys

import numpy as np

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.backends.pairing import Meeting
from pdserve.kvtransfer.doors import ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))


def main() -> None:
    description, num_pages, page_bytes = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    target, pages = Peer(WorkerId("target"), Incarnation(1)), tuple(map(PageId, range(num_pages)))
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    me = Peer(WorkerId("writer"), Incarnation(1))
    region = Region.of(np.ones((num_pages, page_bytes), np.uint8))
    mover = Mover(CollectiveBackend(me, region, Meeting(b"s" * 32)), stopped.put)
    mover.attach(target, description)
    for number in range(1 << 20):
        mover.write(target, HANDOFF, pages, pages)
        if number == 3:
            sys.stdout.write("writing\n")
            sys.stdout.flush()
        if number >= 3:
            stopped.get()


if __name__ == "__main__":
    main()
