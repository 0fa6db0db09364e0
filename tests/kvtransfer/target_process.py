"""A process whose pages others write into: `target_process.py MOVER FILE NUM_PAGES PAGE_BYTES`.

Its pages are the file, so that a test sees them whatever becomes of the process. Prints its description, ends with its
standard input.
"""

import sys

import numpy as np

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import Peer, WorkerId
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region


def mover_of(kind: str, region: Region) -> Mover:
    """Start one; torch takes seconds to import, so only where it is needed."""
    me = Peer(WorkerId("target"), new_incarnation())
    if kind in ("collective", "staged"):
        from pdserve.kvtransfer.backends.collective import CollectiveBackend  # noqa: PLC0415
        from pdserve.kvtransfer.backends.pairing import Meeting  # noqa: PLC0415

        return Mover(CollectiveBackend(me, region, Meeting(b"s" * 32), staged=kind == "staged"), lambda _: None)
    from pdserve.kvtransfer.backends.nixl import NixlBackend  # noqa: PLC0415

    network = Network(tcp_only=kind.endswith("-tcp"))
    return Mover(NixlBackend(me, region, network, has_thread=not kind.startswith("driven")), lambda _: None)


def main() -> None:
    kind, path, num_pages, page_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    view = np.memmap(path, np.uint8, "r+", shape=(num_pages, page_bytes))
    mover = mover_of(kind, Region.of(view))
    sys.stdout.write(mover.describe().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    mover.close()


if __name__ == "__main__":
    main()
