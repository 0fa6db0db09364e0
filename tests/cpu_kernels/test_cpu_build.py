"""The library is compiled once for all processes, appears whole, and what keeps it from being there has a reason."""

import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from looking import until

from pdserve.kernels.cpu import build
from pdserve.kernels.cpu.build import FLAGS, NATIVE, SOURCES, Missing, Reason, built
from pdserve.kernels.cpu.library import library

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit; fi
echo run >> "{runs}"
sleep 0.2
while [ "$1" != -o ]; do shift; done
echo library > "$2"
exit {status}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve" / "kernels"


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    """Set a compiler that writes a line into the file returned whenever it compiles."""
    script, runs = folder / "fakecc", folder / "runs"
    script.write_text(FAKE_COMPILER.format(runs=runs, status=status))
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return runs


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def reason(found: Path | Missing) -> Reason | None:
    return found.reason if isinstance(found, Missing) else None


@pytest.mark.long
def test_the_sources_compile_without_a_warning() -> None:
    units = [str(path) for path in SOURCES.glob("*.c")]
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = ["gcc", *flags, "-O0", "-fsyntax-only", "-Wextra", "-Werror", *units]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_compilers_that_do_not_know_float16_compile_the_sources() -> None:
    units = [str(path) for path in SOURCES.glob("*.c")]
    flags = [flag for flag in FLAGS if flag not in ("-shared", NATIVE)]
    command = ["gcc", *flags, "-O0", "-fsyntax-only", "-D_Float16=unknown", *units]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_processes_that_start_together_compile_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake_compiler(tmp_path, monkeypatch)
    code = "from pdserve.kernels.cpu.build import built; print(built())"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    shown = {process.communicate()[0].strip() for process in started}
    assert shown == {str(built())}
    assert runs.read_text() == "run\n"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert list(cache.glob("*.tmp")) == []


def test_other_flags_make_another_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch)
    first = built()
    monkeypatch.setattr(build, "FLAGS", (*FLAGS, "-DOTHER"))
    assert built() != first
    assert len(list(cache.glob("*.so"))) == 2


def test_a_machine_without_a_compiler_has_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert reason(built()) is Reason.COMPILER


def test_a_compiler_that_fails_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, monkeypatch, status=1)
    assert reason(built()) is Reason.COMPILING
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_compiler_that_takes_too_long_is_ended_with_what_it_has_started(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, child = tmp_path / "slowcc", tmp_path / "child"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 600 &\necho $! > {child}\nwait\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 3.0)
    missing = built()
    assert isinstance(missing, Missing)
    assert (missing.reason, missing.detail) == (Reason.COMPILING, "it took longer than 3 s")
    until(lambda: has_ended(int(child.read_text())))
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_nothing_is_run_from_a_folder_that_others_may_write_to(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch)
    assert reason(built()) is None
    cache.chmod(0o777)
    assert reason(built()) is Reason.FOLDER


def test_a_folder_that_cannot_be_made_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    missing = built()
    assert isinstance(missing, Missing)
    assert missing.reason is Reason.FOLDER
    folder = tmp_path / "file" / "pdserve" / "kernels"
    cure = "set XDG_CACHE_HOME to a folder that this user can write to"
    assert missing.detail == f"{folder}: Not a directory; {cure}"


def test_a_library_that_cannot_be_loaded_is_missing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(tmp_path, monkeypatch)
    library.cache_clear()
    try:
        found = [library() for _ in range(3)]
    finally:
        library.cache_clear()
    assert isinstance(found[0], Missing)
    assert found[0].reason is Reason.LOADING
    assert caplog.text.count("no compiled kernels") == 1


ONE_RUNTIME = """
import torch
from pathlib import Path
from pdserve.kernels.cpu.library import library

name = str(library()._name)
lines = Path("/proc/self/maps").read_text().splitlines()
assert any(name in line for line in lines), name
runtimes = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}
assert len(runtimes) == 1, runtimes
"""


def test_one_openmp_runtime_serves_torch_and_the_library() -> None:
    """In a process of its own: other packages, such as sentencepiece, bring a runtime that they alone use."""
    done = subprocess.run([sys.executable, "-c", ONE_RUNTIME], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
