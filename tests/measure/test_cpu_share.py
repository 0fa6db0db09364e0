"""Processes that are held to a share of a core."""

from pathlib import Path

import pytest

from pdserve.errors import CommandError
from pdserve.measure import cpu_share


def test_processes_are_held_in_a_group_of_their_own_and_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(cpu_share, "GROUPS", tmp_path)
    with cpu_share.held([7, 8], 0.24):
        (group,) = (path for path in tmp_path.iterdir() if path.is_dir())
        assert (group / "cpu.max").read_text() == "2400 10000"
        assert (group / "cgroup.procs").read_text() == "8"
        for file in group.iterdir():  # those of a real group go with it
            file.unlink()
    assert (tmp_path / "cgroup.procs").read_text() == "8"


def test_where_no_group_can_be_made_the_command_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_share, "GROUPS", tmp_path / "missing")
    with pytest.raises(CommandError, match="cpu_share"), cpu_share.held([7], 0.1):
        pass
