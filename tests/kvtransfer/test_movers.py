"""One contract for every mover; and what NIXL makes of processes that die or freeze."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.errors import InvariantError, ProtocolError
from pdserve.ids import Incarnation, PageId, WorkerId, new_incarnation
from pdserve.kvtransfer.backends.collective import CollectiveMover
from pdserve.kvtransfer.backends.loopback import LoopbackMover
from pdserve.kvtransfer.backends.nixl import NixlMover
from pdserve.kvtransfer.digest import first_mismatch, page_digests
from pdserve.kvtransfer.mover import ByteRows, CopyStopped, Description, Mover, OnStopped, ProbeError, Region
from pdserve.kvtransfer.session import Pages, Peer

NUM_PAGES, PAGE_BYTES = 96, 360 * 1024
NOBODY = Peer(WorkerId("nobody"), Incarnation(1))
TARGET_PROCESS = Path(__file__).with_name("target_process.py")


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
    stopped: queue.SimpleQueue[CopyStopped] = field(default_factory=queue.SimpleQueue)

    def next_stopped(self, timeout_s: float = 20.0) -> CopyStopped:
        return self.stopped.get(timeout=timeout_s)

    def write(self, target: Target, src: Pages, dst: Pages) -> CopyStopped:
        copy_id = self.mover.write(target.peer, src, dst)
        stopped = self.next_stopped()
        assert stopped.copy_id == copy_id
        return stopped


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
        stopped: queue.SimpleQueue[CopyStopped] = queue.SimpleQueue()
        mover = self.mover(view, stopped.put)
        self.stack.callback(mover.close)
        return Writer(mover, view, stopped)

    def mover(self, view: ByteRows, on_stopped: OnStopped) -> Mover:
        if self.name == "loopback":
            return LoopbackMover(Region.of(view), on_stopped)
        if self.name == "collective":
            return CollectiveMover(Region.of(view), on_stopped)
        return NixlMover(Peer(WorkerId("writer"), new_incarnation()), Region.of(view), on_stopped)

    def target(self) -> Target:
        peer = Peer(WorkerId("target"), new_incarnation())
        if self.name == "loopback":
            view = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
            mover = LoopbackMover(Region.of(view), lambda _: None)
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


@pytest.fixture(scope="module")
def idle() -> Iterator[Idle]:
    """Target processes for each kind of mover, ended after the last test."""
    idle: Idle = {"loopback": [], "nixl-shm": [], "nixl-tcp": [], "collective": []}
    yield idle
    for target in (target for targets in idle.values() for target in targets):
        assert target.process is not None
        target.process.communicate()
        assert target.process.returncode == 0


@contextmanager
def setting_of(name: str, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if name == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp")
        yield Setting(name, tmp_path, stack, idle[name])


@pytest.fixture(params=["loopback", "nixl-shm", "nixl-tcp", "collective"])
def setting(request: pytest.FixtureRequest, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of(request.param, idle, tmp_path) as setting:
        yield setting


@pytest.fixture(params=["nixl-shm", "nixl-tcp", "collective"])
def remote(request: pytest.FixtureRequest, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of(request.param, idle, tmp_path) as setting:
        yield setting


@pytest.fixture
def loopback(idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of("loopback", idle, tmp_path) as setting:
        yield setting


@pytest.fixture(params=["nixl-tcp", "collective"])
def tcp(request: pytest.FixtureRequest, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of(request.param, idle, tmp_path) as setting:
        yield setting


def pages(*numbers: int) -> Pages:
    return tuple(PageId(number) for number in numbers)


def test_the_pages_named_arrive_and_no_others(setting: Setting) -> None:
    writer, target = setting.attached()
    src, dst = pages(5, 0, 95), pages(3, 90, 4)
    stopped = writer.write(target, src, dst)
    assert stopped.digests == page_digests(writer.view, src)
    assert np.array_equal(target.view[list(dst)], writer.view[list(src)])
    assert set(target.view.any(axis=1).nonzero()[0]) == set(dst)


def test_digests_find_the_page_that_differs(setting: Setting) -> None:
    writer, target = setting.attached()
    src, dst = pages(*range(8)), pages(*range(20, 28))
    digests = writer.write(target, src, dst).digests
    assert digests is not None
    assert first_mismatch(target.view, dst, digests) is None
    target.view[25, PAGE_BYTES - 1] ^= 1
    assert first_mismatch(target.view, dst, digests) == 5


def test_many_copies_at_once_arrive_and_are_reported_in_their_order(setting: Setting) -> None:
    writer, target = setting.attached()
    copies = [pages(*range(first, first + 1 + first % 5)) for first in range(0, 90, 5)] * 5
    ids = [writer.mover.write(target.peer, copy, copy) for copy in copies]
    reports = [writer.next_stopped() for _ in copies]
    assert [report.copy_id for report in reports] == ids
    assert all(report.digests == page_digests(writer.view, c) for report, c in zip(reports, copies, strict=True))
    written = sorted({page for copy in copies for page in copy})
    assert np.array_equal(target.view[written], writer.view[written])


def test_a_copy_of_many_slices_arrives_whole(setting: Setting) -> None:
    writer, target = setting.attached()
    everything = pages(*range(NUM_PAGES))
    stopped = writer.write(target, everything, everything[::-1])
    assert stopped.digests is not None
    assert len(stopped.digests) == NUM_PAGES
    assert np.array_equal(target.view[::-1], writer.view)


def test_writers_of_several_threads_and_to_several_peers_do_not_mix(setting: Setting) -> None:
    writer, first = setting.attached()
    second = setting.target()
    writer.mover.attach(second.peer, second.description)

    def write(target: Target, page: int) -> None:
        for number in range(page, NUM_PAGES, 2):
            writer.mover.write(target.peer, pages(number), pages(number))

    threads = [threading.Thread(target=write, args=(t, p)) for t in (first, second) for p in (0, 1)]
    for thread in threads:
        thread.start()
    assert all(writer.next_stopped().digests is not None for _ in range(2 * NUM_PAGES))
    for thread in threads:
        thread.join()
    assert np.array_equal(first.view, writer.view)
    assert np.array_equal(second.view, writer.view)


def test_a_copy_to_nobody_is_reported_as_failed(setting: Setting) -> None:
    writer = setting.writer()
    writer.mover.write(NOBODY, pages(0), pages(0))
    stopped = writer.next_stopped()
    assert stopped.digests is None
    assert stopped.reason == "nobody is not attached"


def test_a_copy_outside_of_the_peers_pages_fails_alone(setting: Setting) -> None:
    writer, target = setting.attached()
    stopped = writer.write(target, pages(0), pages(NUM_PAGES))
    assert stopped.digests is None
    assert "96 pages, granted page 96" in stopped.reason
    assert not target.view.any()
    assert writer.write(target, pages(0), pages(NUM_PAGES - 1)).digests is not None


def test_nothing_is_written_to_a_forgotten_peer(setting: Setting) -> None:
    writer, target = setting.attached()
    writer.mover.forget(target.peer)
    writer.mover.forget(target.peer)
    assert writer.write(target, pages(0), pages(0)).digests is None
    assert not target.view.any()


def test_attaching_again_changes_nothing(setting: Setting) -> None:
    writer, target = setting.attached()
    writer.mover.attach(target.peer, target.description)
    assert writer.write(target, pages(1), pages(2)).digests is not None


def test_a_probe_measures_the_way_to_a_peer_and_touches_no_page(setting: Setting) -> None:
    writer, target = setting.attached()
    speed = writer.mover.probe(target.peer).result(timeout=20)
    assert speed.bytes_per_s > 1e6
    assert 0 < speed.page_s < 1
    assert (
        speed.carrier
        == {"loopback": "memory", "nixl-shm": "not tcp", "nixl-tcp": "tcp", "collective": "tcp"}[setting.name]
    )
    assert not target.view.any()
    assert writer.write(target, pages(1), pages(2)).digests is not None


def test_copies_asked_for_while_a_probe_runs_arrive_whole_and_the_probe_ends_as_well(setting: Setting) -> None:
    writer, target = setting.attached()
    probed = writer.mover.probe(target.peer)
    for number in range(0, NUM_PAGES, 8):
        some = pages(*range(number, number + 8))
        assert writer.write(target, some, some).digests is not None
    assert probed.result(timeout=20).bytes_per_s > 0
    assert np.array_equal(target.view, writer.view)


def test_a_probe_of_nobody_fails_and_breaks_nothing(setting: Setting) -> None:
    writer, target = setting.attached()
    with pytest.raises(ProbeError, match="nobody is not attached"):
        writer.mover.probe(NOBODY).result(timeout=20)
    assert writer.write(target, pages(1), pages(2)).digests is not None


def test_a_probe_that_is_given_up_leaves_the_pair_as_it_was(setting: Setting) -> None:
    writer, target = setting.attached()
    writer.mover.probe(target.peer).cancel()
    assert writer.write(target, pages(1), pages(2)).digests is not None
    assert writer.mover.probe(target.peer).result(timeout=20).bytes_per_s > 0


def test_pages_of_another_size_are_refused(setting: Setting) -> None:
    writer, target = setting.writer(), setting.target()
    known = Description.decode(target.description)
    other = replace(known, page_bytes=known.page_bytes // 2)
    with pytest.raises(ProtocolError, match=r"page_bytes: 184320 there, 368640 here"):
        writer.mover.attach(target.peer, other.encode())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"XXXX" + data[4:],
        lambda data: data[:4] + b"\x00\x09" + data[6:],
        lambda data: data[:6] + b"\xff" * 8 + data[14:],
        lambda data: data[:14] + bytes(8) + data[22:],
        lambda data: data + bytes(1 << 20),
    ],
)
def test_a_spoilt_description_is_refused(loopback: Setting, spoil: Callable[[bytes], bytes]) -> None:
    writer, target = loopback.writer(), loopback.target()
    with pytest.raises(ProtocolError, match="mover_metadata"):
        writer.mover.attach(target.peer, spoil(target.description))


def test_a_lane_that_cannot_be_used_is_refused(setting: Setting) -> None:
    writer, target = setting.writer(), setting.target()
    known = Description.decode(target.description)
    strange = replace(known, lane=b"no such lane")
    with pytest.raises(ProtocolError, match="mover_metadata"):
        writer.mover.attach(target.peer, strange.encode())


def test_a_closed_mover_takes_no_orders(loopback: Setting) -> None:
    mover = loopback.mover(np.zeros((2, 8), np.uint8), lambda _: None)
    mover.close()
    with pytest.raises(InvariantError, match="closed"):
        mover.write(NOBODY, pages(0), pages(0))


def test_every_copy_to_a_killed_process_is_reported_within_two_seconds(remote: Setting) -> None:
    writer, target = remote.attached()
    everything = pages(*range(NUM_PAGES))
    ids = [writer.mover.write(target.peer, everything, everything) for _ in range(20)]
    first = writer.next_stopped()
    target.kill()
    killed_s = time.monotonic()
    reports = [first, *(writer.next_stopped() for _ in ids[1:])]
    assert time.monotonic() - killed_s < 2.0
    assert [report.copy_id for report in reports] == ids
    assert reports[-1].digests is None
    assert reports[-1].reason


def test_a_killed_process_is_replaced_by_another(remote: Setting) -> None:
    writer, target = remote.attached()
    everything = pages(*range(NUM_PAGES))
    writer.mover.write(target.peer, everything, everything)
    target.kill()
    writer.next_stopped()
    assert writer.write(target, pages(0), pages(0)).digests is None
    writer.mover.forget(target.peer)
    heir = remote.target()
    writer.mover.attach(heir.peer, heir.description)
    assert writer.write(heir, everything, everything).digests is not None
    assert np.array_equal(heir.view, writer.view)


def test_a_copy_to_a_frozen_process_is_not_reported_until_the_process_is_known_to_be_dead(tcp: Setting) -> None:
    writer, target = tcp.attached()
    everything = pages(*range(NUM_PAGES))
    assert writer.write(target, pages(0), pages(0)).digests is not None
    target.signal(signal.SIGSTOP)
    copy_id = writer.mover.write(target.peer, everything, everything)
    with pytest.raises(queue.Empty):
        writer.next_stopped(timeout_s=1.5)
    target.kill()
    writer.mover.forget(target.peer)
    stopped = writer.next_stopped(timeout_s=2.0)
    assert stopped.copy_id == copy_id
    assert stopped.digests is None


def test_a_thawed_process_gets_what_was_under_way(tcp: Setting) -> None:
    writer, target = tcp.attached()
    everything = pages(*range(NUM_PAGES))
    assert writer.write(target, pages(0), pages(0)).digests is not None
    target.signal(signal.SIGSTOP)
    writer.mover.write(target.peer, everything, everything)
    target.signal(signal.SIGCONT)
    assert writer.next_stopped().digests is not None
    assert np.array_equal(target.view, writer.view)


def test_an_attached_mover_without_work_uses_no_processor(remote: Setting) -> None:
    writer, target = remote.attached()
    assert writer.write(target, pages(0), pages(0)).digests is not None
    assert target.process is not None
    before_s = time.process_time() + _process_cpu_s(target.process.pid)
    with pytest.raises(queue.Empty):
        writer.next_stopped(timeout_s=1.0)
    used_s = time.process_time() + _process_cpu_s(target.process.pid) - before_s
    assert used_s < 0.06


def _process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_closed_mover_leaves_no_thread_and_no_file_behind(setting: Setting) -> None:
    target = setting.target()
    held = []
    for _ in range(6):
        view = np.ones((4, PAGE_BYTES), np.uint8)
        stopped: queue.SimpleQueue[CopyStopped] = queue.SimpleQueue()
        mover = setting.mover(view, stopped.put)
        mover.attach(target.peer, target.description)
        mover.write(target.peer, pages(0), pages(1))
        assert stopped.get(timeout=20).digests is not None
        mover.close()
        held.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
    assert held[5] < held[1] + 4  # a leak leaves four at least; a thread may be seen as it ends
