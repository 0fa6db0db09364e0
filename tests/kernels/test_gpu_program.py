"""The GPU program: what of it can be seen without a GPU, and all of it where there is one."""

import json
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


def test_a_section_that_raises_fails_and_costs_no_other_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    run_gpu, report = import_module("run_gpu"), import_module("gpu_report")

    def broken(only: str) -> list[object]:
        raise RuntimeError(f"out of {only}")

    sections = [
        ("first", "check", lambda only: [report.Row(only)]),
        ("second", "check", broken),
        ("third", "bench", lambda only: [report.Row(only)]),
        ("fourth", "tune", lambda _: []),
    ]
    for module, name, result in (
        (run_gpu, "_find_package", None),
        (run_gpu, "_sections", sections),
        (report, "has_gpu", True),
        (report, "machine", {}),
        (report, "clocks", {}),
    ):
        monkeypatch.setattr(module, name, lambda result=result: result)
    monkeypatch.setenv("OUT", str(tmp_path))

    def runs(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run_gpu.py", *arguments, "--only", "memory"])
        status: int = run_gpu.main()
        return status

    assert runs() == 1
    found = json.loads((tmp_path / "kernels.json").read_text())
    shown = {
        name: [(each["name"], each["note"], each["failed"]) for each in found.get(name, [])] for name, *_ in sections
    }
    assert shown == {
        "first": [("memory", "", False)],
        "second": [("second", "RuntimeError: out of memory", True)],
        "third": [("memory", "", False)],
        "fourth": [],
    }
    assert runs("bench") == 0
    assert runs("tune") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_agrees_with_float64_on_the_gpu() -> None:
    done = run_program(ROOT, "check")
    assert done.returncode == 0, done.stdout
