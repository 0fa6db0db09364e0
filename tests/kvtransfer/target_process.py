"""A process whose pages others write into: `target_process.py FILE NUM_PAGES PAGE_BYTES`.

Its pages are the file, so that a test sees them whatever becomes of the process. Prints its description, ends with its
standard input.
"""

import sys

import numpy as np

from pdserve.ids import WorkerId, new_incarnation
from pdserve.kvtransfer.backends.nixl import NixlMover
from pdserve.kvtransfer.mover import Region
from pdserve.kvtransfer.session import Peer


def main() -> None:
    path, num_pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    view = np.memmap(path, np.uint8, "r+", shape=(num_pages, page_bytes))
    mover = NixlMover(Peer(WorkerId("target"), new_incarnation()), Region.of(view), lambda _: None)
    sys.stdout.write(mover.describe().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    mover.close()


if __name__ == "__main__":
    main()
