"""The GPU program: its sections on a CPU with tiny shapes, and how it keeps going whatever a section does."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_fakes as fakes
import pytest
import run_gpu
import torch
from gpu_device import Interpreter
from gpu_process import DONE, LATE, LOST, Computing, Options, Record, deal, run_section
from gpu_report import Row, Section

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"TRITON_INTERPRET", "PYTHONPATH"}}
QUICK = ("ceilings", "prefill")
RECORD_KEYS = {"state", "budget_s", "took_s", "clocks", "rows"}
ROW_KEYS = {"name", "figures", "note", "failed"}


def run_program(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tests" / "gpu" / "run_gpu.py"), *arguments]
    environment = ENVIRONMENT | environment
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_tree_without_its_links_gets_them_back_and_without_a_gpu_nothing_runs(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("kernels", "kvtransfer", "tests/gpu", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skip)
    shutil.copytree(ROOT / "pdserve", tmp_path / "pdserve", symlinks=True, ignore=skip)
    (tmp_path / "pdserve" / "kernels").unlink()
    done = run_program(tmp_path)
    assert (done.returncode, done.stderr) == (2, "no CUDA device: nothing to do\n")
    assert (tmp_path / "pdserve" / "kernels").resolve() == tmp_path / "kernels"


def test_a_python_that_lacks_a_package_is_told_which() -> None:
    command = [sys.executable, "-S", str(ROOT / "tests" / "gpu" / "run_gpu.py")]  # -S: without installed packages
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"python\S* lacks numpy, safetensors, torch, triton: install them.*\n", done.stderr)


def test_a_section_that_is_unknown_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--only", "ceilings,prefil"])
    with pytest.raises(SystemExit, match="2"):
        run_gpu.main()
    assert "no section is called prefil: there are ceilings, " in capsys.readouterr().err


def dry_run(out: Path, *arguments: str) -> dict[str, Record]:
    """Run dry; return the sections, and see that all is well and the file is whole."""
    done = run_program(ROOT, "--dry", *arguments, OUT=str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all well\n")
    assert [path.name for path in out.iterdir() if path.suffix == ".partial"] == []
    found = json.loads((out / "gpu.json").read_text())
    assert set(found) == {"is_dry", "machine", "seconds", "sections"}
    sections: dict[str, Record] = found["sections"]
    for name, section in found["sections"].items():
        assert set(section) == RECORD_KEYS
        assert section["state"] == DONE, name
        assert all(set(row) == ROW_KEYS for row in section["rows"])
        assert section["rows"], name
        assert f"== {name}: done, " in done.stdout
    return sections


def test_a_dry_run_walks_through_a_few_sections(tmp_path: Path) -> None:
    assert tuple(dry_run(tmp_path / "new", "--only", ",".join(QUICK))) == QUICK


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_dry_run_walks_through_every_section(tmp_path: Path) -> None:
    from gpu_sections import SECTIONS  # noqa: PLC0415 - it imports all kernels

    assert tuple(dry_run(tmp_path, "--only", ",".join(SECTIONS))) == tuple(SECTIONS)
    files = {"gpu.json", "memcheck.txt", "racecheck.txt", "nixl-prefill.log", "nixl-decode.log"}
    assert {path.name for path in tmp_path.iterdir()} == files


def names(record: Record) -> list[str]:
    return [row.name for row in record.rows]


@pytest.mark.long
def test_sections_end_each_in_its_way_and_the_next_one_goes_on() -> None:
    computing = Computing(Options(is_dry=True))
    section_of = {
        each.__name__: Section(each.__name__, 1.0, each)
        for each in (fakes.well, fakes.raising, fakes.raising_between, fakes.dying, fakes.hanging, fakes.losing)
    }
    try:
        first = computing.run(section_of["well"], 60, 60)
        assert (first.state, names(first), first.clocks) == (DONE, ["first", "second"], "none: a dry run")
        assert computing.facts["gpu"] == "none: a dry run"

        raised = computing.run(section_of["raising"], 60, 60)
        assert (raised.state, names(raised)) == (DONE, ["before", "broken", "after"])
        assert [(row.failed, row.note) for row in raised.rows] == [
            (False, ""),
            (True, "RuntimeError: out of memory"),
            (False, ""),
        ]
        between = computing.run(section_of["raising_between"], 60, 60)
        assert [(row.name, row.failed) for row in between.rows] == [("first", False), ("raising_between", True)]
        again = computing.run(section_of["well"], 60, 60)
        assert again.rows == first.rows, "the same process"

        died = computing.run(section_of["dying"], 60, 60)
        assert (died.state, names(died)) == ("the process ended with status 3", ["first", "dying"])
        hung = computing.run(section_of["hanging"], 60, 3)
        assert (hung.state, names(hung)) == ("killed: it did not end", ["first", "hanging"])
        lost = computing.run(section_of["losing"], 60, 60)
        assert (lost.state, names(lost)) == (LOST, ["loses the device"])
        last = computing.run(section_of["well"], 60, 60)
        assert names(last) == names(first)
        assert last.rows != first.rows, "another process"
    finally:
        computing.close()


def test_what_a_case_has_used_is_gone_when_the_next_one_is_set_up() -> None:
    rows: list[Row] = []
    assert run_section(Section("holding", 1.0, fakes.holding), Interpreter(), 60, rows.append) == DONE
    assert rows == [Row("used it"), Row("left it", {"are left": 0.0})]


@pytest.mark.long
def test_a_section_that_runs_out_of_time_says_so_between_two_cases() -> None:
    computing = Computing(Options(is_dry=True))
    try:
        record = computing.run(Section("slow", 1.0, fakes.slow), 0.2, 60)
    finally:
        computing.close()
    assert record.state == LATE
    assert 1 <= len(record.rows) - 1 <= 5
    assert record.rows[-1].note.endswith(f"the first left out is number {len(record.rows) - 1}")
    assert not any(row.failed for row in record.rows)


def test_time_is_dealt_by_weight_and_what_one_leaves_is_the_others() -> None:
    sections = [Section(str(weight), weight, fakes.well) for weight in (1.0, 3.0, 4.0)]
    dealt = list(deal(sections, 80))
    assert [share for _, share, _ in dealt] == pytest.approx([10, 240 / 7, 80], rel=1e-3), "none of it was used"
    assert [limit for _, _, limit in dealt] == pytest.approx([30, 240 / 7 + 20, 80], rel=1e-3)
    assert [share for _, share, _ in deal(sections, 0.0)] == [0.0] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_agrees_with_float64_on_the_gpu() -> None:
    done = run_program(ROOT, "--only", "checks", "--all")
    assert done.returncode == 0, done.stdout
