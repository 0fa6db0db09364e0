"""Holds processes to a share of a core with Linux's control groups, so that what they serve is compared fairly.

Needs the right to make a control group, which root has.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pdserve.errors import CommandError

GROUPS = Path("/sys/fs/cgroup")
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
    try:
        group.mkdir()
        for name, limit in limits.items():
            (group / name).write_text(limit)
        _move(pids, group)
    except OSError as error:
        raise CommandError(f"cpu_share: {group}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # they have ended
            _move(pids, parent)
        group.rmdir()


def _move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        (group / "cgroup.procs").write_text(f"{pid}")
