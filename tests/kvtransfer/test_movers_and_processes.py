"""What movers make of processes that die, freeze or do nothing."""

import os
import queue
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from long_cases import long
from mover_settings import HANDOFF, NUM_PAGES, Setting, Target, Writer, pages

pytestmark = pytest.mark.slow

OTHERS = long("nixl-shm", "driven-tcp", "collective", "staged")
REMOTE = pytest.mark.parametrize("remote", ["nixl-tcp", *OTHERS], indirect=True)  # others in make test-long
TCP = pytest.mark.parametrize("tcp", ["nixl-tcp", *OTHERS[1:]], indirect=True)
SOON_S = 10.0  # a fraction of a second where nothing else runs; who waits for TCP to give up takes minutes


def test_every_copy_to_a_killed_process_is_reported_soon(remote: Setting) -> None:
    writer, target = remote.attached()
    everything = pages(*range(NUM_PAGES))
    for _ in range(20):
        writer.mover.write(target.peer, HANDOFF, everything, everything)
    first = writer.next_stopped()
    target.kill()
    killed_s = time.monotonic()
    reports = [first, *(writer.next_stopped() for _ in range(19))]
    assert time.monotonic() - killed_s < SOON_S
    assert reports[-1].digests is None
    assert reports[-1].reason


@REMOTE
def test_a_killed_process_is_replaced_by_another(remote: Setting) -> None:
    writer, target = remote.attached()
    everything = pages(*range(NUM_PAGES))
    writer.mover.write(target.peer, HANDOFF, everything, everything)
    target.kill()
    writer.next_stopped()
    assert writer.write(target, pages(0), pages(0)).digests is None
    writer.mover.forget(target.peer)
    heir = remote.target()
    writer.mover.attach(heir.peer, heir.description)
    assert writer.write(heir, everything, everything).digests is not None
    assert np.array_equal(heir.view, writer.view)


def frozen(setting: Setting) -> tuple[Writer, Target]:
    """Return a writer, and a process that is frozen while it is written to."""
    writer, target = setting.attached()
    everything = pages(*range(NUM_PAGES))
    assert writer.write(target, pages(0), pages(0)).digests is not None
    target.signal(signal.SIGSTOP)
    writer.mover.write(target.peer, HANDOFF, everything, everything)
    return writer, target


@TCP
def test_a_copy_to_a_frozen_process_is_not_reported_until_the_process_is_known_to_be_dead(tcp: Setting) -> None:
    writer, target = frozen(tcp)
    with pytest.raises(queue.Empty):
        writer.next_stopped(timeout_s=1.5)
    target.kill()
    writer.mover.forget(target.peer)
    stopped = writer.next_stopped(timeout_s=2.0)
    assert stopped.digests is None


@TCP
def test_a_thawed_process_gets_what_was_under_way(tcp: Setting) -> None:
    writer, target = frozen(tcp)
    target.signal(signal.SIGCONT)
    assert writer.next_stopped().digests is not None
    assert np.array_equal(target.view, writer.view)


@REMOTE
def test_an_attached_mover_without_work_uses_no_processor(remote: Setting) -> None:
    writer, target = remote.attached()
    assert writer.write(target, pages(0), pages(0)).digests is not None
    assert target.process is not None
    before_s = time.process_time() + _process_cpu_s(target.process.pid)
    with pytest.raises(queue.Empty):
        writer.next_stopped(timeout_s=1.0)
    used_s = time.process_time() + _process_cpu_s(target.process.pid) - before_s
    assert used_s < (0.15 if remote.name == "driven-tcp" else 0.06)  # which looks every 2 ms


def _process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
