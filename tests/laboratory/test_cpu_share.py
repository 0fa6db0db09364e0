"""What processes take of the processors, and processes that are held to a share of a core."""

import os
import time
from pathlib import Path

import pytest

from lab import cpu_share
from pdserve.base.errors import CommandError
from pdserve.measure.frontend import cpu_s


def test_the_cpu_time_of_a_process_is_what_it_sees_itself() -> None:
    least_s, found_s, most_s = time.process_time(), cpu_s(os.getpid()), time.process_time()
    assert least_s < found_s < most_s  # which no clock of hundredths of a second would tell apart


def test_processes_are_held_in_a_group_of_their_own_and_let_go_to_where_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moves = []

    def move(pid: int, to: Path) -> None:
        moves.append((pid, to.name))
        if to.name == "first":
            raise ProcessLookupError  # it has ended

    (tmp_path / "cgroup.controllers").touch()
    for pid, place in ((7, "first"), (8, "second")):
        (tmp_path / place).mkdir()
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cgroup").write_text(f"1:name=systemd:/\n0::/{place}\n")
    monkeypatch.setattr(cpu_share, "GROUPS", tmp_path)
    monkeypatch.setattr(cpu_share, "PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(cpu_share, "_move", move)
    with cpu_share.held([7, 8], 0.24):
        (group,) = tmp_path.glob("pdserve-bench-*")
        assert (group / "cpu.max").read_text() == "2400 10000"
        (group / "cpu.max").unlink()  # that of a real group goes with it
    assert moves == [(7, group.name), (8, group.name), (7, "first"), (8, "second")]
    assert not group.exists()


def test_where_no_group_can_be_made_the_command_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_share, "GROUPS", tmp_path / "missing")
    with pytest.raises(CommandError, match="cpu_share"), cpu_share.held([7], 0.1):
        pass
