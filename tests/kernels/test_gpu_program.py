"""The GPU program: what of it can be seen without a GPU, and all of it where there is one."""

import os
import shutil
import subprocess
import sys
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_agrees_with_float64_on_the_gpu() -> None:
    done = run_program(ROOT, "check")
    assert done.returncode == 0, done.stdout
