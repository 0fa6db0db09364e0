"""What NIXL over TCP makes of cut lanes. Run in a network namespace by test_cut_lanes.py."""

import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from network_namespace import DROP, RESET, cut, lane_ports, raise_loopback

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import Attempt, AttemptKey, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import ByteRows, Region

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))

NUM_PAGES, PAGE_BYTES = 64, 1 << 20
PAGES = tuple(PageId(n) for n in range(NUM_PAGES))
TARGET_PROCESS = Path(__file__).with_name("target_process.py")


@pytest.fixture(autouse=True, scope="module")
def network() -> None:
    raise_loopback()


@dataclass
class Rig:
    process: subprocess.Popen[str]
    landed: ByteRows
    mover: Mover
    peer: Peer
    stopped: queue.SimpleQueue[ReceiverMessage]

    def num_landed(self) -> int:
        """Return how many bytes have arrived: what is written is nowhere zero."""
        return int(np.count_nonzero(self.landed))

    def write(self) -> None:
        self.mover.write(self.peer, HANDOFF, PAGES, PAGES)

    def next_stopped(self) -> CopyStopped:
        return self.stopped.get(timeout=30).event


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    path = tmp_path / "pages"
    landed = np.memmap(path, np.uint8, "w+", shape=(NUM_PAGES, PAGE_BYTES))
    command = [sys.executable, str(TARGET_PROCESS), "nixl-tcp", str(path), str(NUM_PAGES), str(PAGE_BYTES)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    description = bytes.fromhex(process.stdout.readline())
    stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
    ours = np.full((NUM_PAGES, PAGE_BYTES), 7, np.uint8)
    me, peer = (Peer(WorkerId(name), new_incarnation()) for name in ("writer", "target"))
    mover = Mover(NixlBackend(me, Region.of(ours), Network(tcp_only=True)), stopped.put)
    mover.attach(peer, description)
    rig = Rig(process, landed, mover, peer, stopped)
    mover.write(peer, HANDOFF, PAGES[:1], PAGES[:1])  # the lane stands
    assert rig.next_stopped().digests is not None
    landed[:] = 0
    yield rig
    process.kill()
    process.communicate()
    mover.forget(peer)
    mover.close()


def test_bytes_land_after_the_writer_was_told_of_an_error_and_the_copy_ended_in_doubt(rig: Rig) -> None:
    rig.process.send_signal(signal.SIGSTOP)
    rig.write()
    with cut(lane_ports(rig.process.pid), RESET):
        stopped = rig.next_stopped()
    assert stopped.digests is None
    assert stopped.in_doubt
    before = rig.num_landed()
    rig.process.send_signal(signal.SIGCONT)
    while rig.num_landed() == before:
        assert rig.process.poll() is None
    assert before < rig.num_landed()


def test_a_blackholed_lane_is_no_error_and_the_copy_goes_on_when_it_heals(rig: Rig) -> None:
    rig.process.send_signal(signal.SIGSTOP)
    rig.write()
    with cut(lane_ports(rig.process.pid), DROP):
        rig.process.send_signal(signal.SIGCONT)
        with pytest.raises(queue.Empty):
            rig.stopped.get(timeout=1.0)
    assert rig.next_stopped().digests is not None
    assert rig.num_landed() == NUM_PAGES * PAGE_BYTES
