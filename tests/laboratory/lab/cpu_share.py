"""Limits the CPU time of processes to a share of a core, so that what they serve can be compared.

Control groups hold processes, which takes the right to make one: root has it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pdserve.base.errors import CommandError

GROUPS, PROCESSES = Path("/sys/fs/cgroup"), Path("/proc")
PERIOD_US = 10_000


@contextmanager
def held(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Let these processes use so many cores together for the length of the block; CommandError where that cannot be."""
    quota_us = round(cores * PERIOD_US)
    if (GROUPS / "cgroup.controllers").exists():
        parent, limits = GROUPS, {"cpu.max": f"{quota_us} {PERIOD_US}"}
    else:
        parent, limits = GROUPS / "cpu", {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{quota_us}"}
    group = parent / f"pdserve-bench-{os.getpid()}-{pids[0]}"
    with _refused(group):
        before = {pid: _group_of(pid, parent) for pid in pids}
        group.mkdir()
    try:
        with _refused(group):
            for name, limit in limits.items():
                (group / name).write_text(limit)
            for pid in pids:
                _move(pid, group)
        yield
    finally:
        for pid, place in before.items():
            with suppress(ProcessLookupError):  # it has ended
                _move(pid, place)
        group.rmdir()


@contextmanager
def _refused(group: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"cpu_share: {group}: {error.strerror}") from error


def _group_of(pid: int, parent: Path) -> Path:
    """Return the group that limits a process's processors; all groups' parent where that cannot be seen from here."""
    for line in (PROCESSES / f"{pid}" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (parent.name if parent != GROUPS else "") in controllers.split(","):
            found = parent / path.lstrip("/")
            return found if found.is_dir() else parent
    return parent


def _move(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(f"{pid}")
