"""Movers of each kind, and targets to write into: for tests that all of them have to pass."""

import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from loopback import loopback_mover

from pdserve.base.clock import new_incarnation
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.backends.collective import CollectiveBackend
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.pairing import Meeting
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import ByteRows, Region
from pdserve.protocol.page_tables import Pages

HANDOFF = AttemptKey(RequestId(bytes(16)), Attempt(0))

NUM_PAGES, PAGE_BYTES = 96, 360 * 1024
NOBODY = Peer(WorkerId("nobody"), Incarnation(1))
TARGET_PROCESS = Path(__file__).parent.parent / "kvtransfer" / "target_process.py"


def nixl_backend(kind: str, me: Peer, region: Region) -> NixlBackend:
    """Return NIXL over TCP alone if the kind ends so, and driven by the mover's thread as on a GPU if it begins so."""
    network = Network(tcp_only=kind.endswith("-tcp"))
    return NixlBackend(me, region, network, has_thread=not kind.startswith("driven"))


@dataclass(frozen=True)
class Target:
    peer: Peer
    description: bytes
    view: ByteRows
    process: subprocess.Popen[str] | None = None

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(5)


@dataclass(frozen=True)
class Writer:
    mover: Mover
    view: ByteRows
    stopped: queue.SimpleQueue[ReceiverMessage] = field(default_factory=queue.SimpleQueue)

    def next_stopped(self, timeout_s: float = 20.0) -> CopyStopped:
        return self.stopped.get(timeout=timeout_s).event

    def write(self, target: Target, src: Pages, dst: Pages) -> CopyStopped:
        self.mover.write(target.peer, HANDOFF, src, dst)
        return self.next_stopped()


@dataclass(frozen=True)
class Setting:
    """One kind of mover, and how to have targets for it.

    Processes take long to start: those of `idle` are used again and go back there, unless a test ends them.
    """

    name: str
    tmp_path: Path
    stack: ExitStack
    idle: list[Target] = field(default_factory=list)

    def writer(self) -> Writer:
        view = np.random.default_rng(7).integers(0, 256, (NUM_PAGES, PAGE_BYTES), np.uint8)
        stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
        mover = self.mover(view, stopped.put)
        self.stack.callback(mover.close)
        return Writer(mover, view, stopped)

    def mover(self, view: ByteRows, on_stopped: OnStopped) -> Mover:
        if self.name == "loopback":
            return loopback_mover(Region.of(view), on_stopped)
        me = Peer(WorkerId("writer"), new_incarnation())
        if self.name in ("collective", "staged"):
            staged = self.name == "staged"
            return Mover(CollectiveBackend(me, Region.of(view), Meeting(b"s" * 32), staged=staged), on_stopped)
        return Mover(nixl_backend(self.name, me, Region.of(view)), on_stopped)

    def target(self) -> Target:
        peer = Peer(WorkerId("target"), new_incarnation())
        if self.name == "loopback":
            view = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
            mover = loopback_mover(Region.of(view), lambda _: None)
            self.stack.callback(mover.close)
            return Target(peer, mover.describe(), view)
        found = self.idle.pop() if self.idle else self._start_target()
        found.view[:] = 0
        self.stack.callback(self._put_back, found)
        return replace(found, peer=peer)

    def _start_target(self) -> Target:
        path = self.tmp_path / f"pages-{new_incarnation():x}"
        view = np.memmap(path, np.uint8, "w+", shape=(NUM_PAGES, PAGE_BYTES))
        command = [sys.executable, str(TARGET_PROCESS), self.name, str(path), str(NUM_PAGES), str(PAGE_BYTES)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return Target(NOBODY, bytes.fromhex(process.stdout.readline()), view, process)

    def _put_back(self, target: Target) -> None:
        assert target.process is not None
        if target.process.poll() is None:
            self.idle.append(target)
        else:
            target.process.communicate()

    def attached(self) -> tuple[Writer, Target]:
        target = self.target()
        writer = self.writer()
        writer.mover.attach(target.peer, target.description)
        return writer, target


Idle = dict[str, list[Target]]


@contextmanager
def setting_of(name: str, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with ExitStack() as stack:
        yield Setting(name, tmp_path, stack, idle[name])


def pages(*numbers: int) -> Pages:
    return tuple(PageId(number) for number in numbers)
