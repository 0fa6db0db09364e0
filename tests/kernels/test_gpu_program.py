"""The GPU program: what of it can be seen without a GPU, and all of it where there is one."""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"TRITON_INTERPRET", "PYTHONPATH"}}


def run_program(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tests" / "gpu" / "run_gpu.py"), *arguments]
    return subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_tree_without_its_links_gets_them_back_and_without_a_gpu_nothing_runs(tmp_path: Path) -> None:
    for folder in ("kernels", "tests/gpu"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pdserve").mkdir()
    shutil.copy(ROOT / "pdserve" / "__init__.py", tmp_path / "pdserve")
    done = run_program(tmp_path)
    assert (done.returncode, done.stderr) == (2, "no CUDA device: nothing to do\n")
    assert (tmp_path / "pdserve" / "kernels").resolve() == tmp_path / "kernels"


def test_a_section_that_is_unknown_is_an_error() -> None:
    done = run_program(ROOT, "checks")
    assert done.returncode == 2
    assert "no section is called checks: there are check, bench, tune" in done.stderr


def test_a_section_that_raises_fails_and_costs_no_other_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    run_gpu, row = import_module("run_gpu"), import_module("gpu_table").Row
    saved: list[dict[str, list[object]]] = []

    def broken(only: str) -> list[object]:
        raise RuntimeError(f"out of memory{only}")

    sections = [
        ("first", "check", lambda _: [row("fine")]),
        ("second", "check", broken),
        ("third", "bench", lambda _: [row("fast")]),
    ]

    def runs(*groups: str) -> bool:
        saved.clear()
        is_well: bool = run_gpu.run_sections(sections, groups, "", lambda tables: saved.append(dict(tables)))
        return is_well

    assert not runs("check", "bench")
    assert [list(each) for each in saved] == [["first"], ["first", "second"], ["first", "second", "third"]]
    assert saved[-1]["second"] == [row("second", note="RuntimeError: out of memory", failed=True)]
    assert runs("bench")
    sections = [("first", "check", lambda _: [])]
    assert not runs("check")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_agrees_with_float64_on_the_gpu() -> None:
    done = run_program(ROOT, "check")
    assert done.returncode == 0, done.stdout
