"""A model whose files are wrong is refused in one line, before `pdserve up` starts any process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from router_fakes import model_folder

PDSERVE = (sys.executable, "-P", "-m", "pdserve")
BROKEN = {
    "chat_template.jinja": b"{{ \xff }}",
    "tokenizer.json": b"[]",
    "config.json": b"{",
}


def broken(tmp_path: Path, name: str) -> Path:
    folder = model_folder(tmp_path)
    (folder / name).write_bytes(BROKEN[name])
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "config.json" else pytest.mark.long) for each in BROKEN]
)
def test_up_starts_no_process_for_a_model_that_no_process_could_serve(tmp_path: Path, name: str) -> None:
    folder = broken(tmp_path, name)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = (*PDSERVE, "up", str(folder), "--load-format", "dummy", "--router-port", "0", "--http-port", "0")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"pdserve: {folder}")
    assert name in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list((tmp_path / "pdserve" / "default" / "logs").iterdir()) == []  # each process has its log from the start


def test_up_starts_no_process_for_a_model_without_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = (*PDSERVE, "up", str(folder), "--router-port", "0", "--http-port", "0")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"pdserve: {folder}: holds neither model.safetensors")
    assert list((tmp_path / "pdserve" / "default" / "logs").iterdir()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "config.json" else pytest.mark.long) for name in BROKEN]
)
def test_a_router_refuses_such_a_model_with_the_status_that_is_not_started_again(tmp_path: Path, name: str) -> None:
    folder = broken(tmp_path, name)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "secret").chmod(0o600)
    flags = ("--model", str(folder), "--secret-file", str(tmp_path / "secret"), "--port", "0", "--internal-port", "0")
    ended = subprocess.run((*PDSERVE, "router", *flags), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert name in ended.stderr
