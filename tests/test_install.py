"""What `make` shows while pip installs: a line a step. What pip says is in a log, and a failure shows its end."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUM_WARNINGS = 80
WARNING = "WARNING: Location 'file:///opt/more/simple/...' is ignored"


def make(venv: Path, target: str, *last: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run an install of the Makefile's with a pip that warns, says this last, and ends with this status."""
    pip = venv / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    said = "\n".join(["Collecting torch", "Installing collected packages: torch, numpy", *last])
    warned = "\n".join([WARNING] * NUM_WARNINGS)
    pip.write_text(f"#!/bin/sh\ncat >&2 <<.\n{warned}\n.\ncat <<.\n{said}\n.\nexit {status}\n")
    pip.chmod(0o700)
    (venv / "bin" / "python").touch()
    command = ["make", "--no-print-directory", f"VENV={venv}", str(venv / target)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("target", "what"), [(".serving", "what serving needs"), (".installed", "what tests need")])
def test_an_install_shows_a_line_a_step_and_logs_the_rest(tmp_path: Path, target: str, what: str) -> None:
    ended = make(tmp_path, target)
    log = tmp_path / "install.log"
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        f"fetching {what}: may take minutes, and is logged in {log}",
        f"installing {what}",
    ]
    assert not ended.stderr
    assert log.read_text().count(WARNING) == NUM_WARNINGS
    assert (tmp_path / target).exists()


def test_an_install_that_fails_names_its_log_shows_the_end_of_it_and_is_not_taken_for_done(tmp_path: Path) -> None:
    ended = make(tmp_path, ".serving", "ERROR: No space left on device", status=1)
    assert ended.returncode != 0
    assert "ERROR: No space left on device\n" in ended.stderr
    assert f"see {tmp_path}/install.log" in ended.stderr
    assert len(ended.stderr.splitlines()) < 25
    assert not (tmp_path / ".serving").exists()


def test_every_install_of_the_makefile_is_logged() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert [line.split()[0] for line in recipes] == ["@$(1)/bin/pip"], "all others call this one"


def test_a_shell_reads_every_recipe(tmp_path: Path) -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = next(line for line in lines if line.startswith(".PHONY:")).split()[1:]
    listed = [
        "make",
        "--no-print-directory",
        "-n",
        f"VENV={tmp_path}/v",
        f"CLIENTS={tmp_path}/c",
        *targets,
        "test-clients",
    ]
    recipes = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "other people's clients" in recipes
    assert "a browser's driver" in recipes
    read = subprocess.run(["bash", "-n"], input=recipes, capture_output=True, text=True, check=False, timeout=60)
    assert (read.returncode, read.stderr) == (0, "")
