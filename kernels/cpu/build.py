"""Compiles the C sources for this processor, once: the library stays in the user's cache folder.

A library's name is a hash of the sources, the compiler, the flags and the processor. It appears whole or not at all.
Processes that start together compile it once.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.base.files import home_folder, make_own_folder, why_unusable

SOURCES = Path(__file__).parent / "src"
CPU_INFO = Path("/proc/cpuinfo")
PROCESSOR_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part")
COMPILERS = ("gcc", "cc", "clang")  # in this order, where CC names none
NATIVE = "-march=native" if platform.machine() == "x86_64" else "-mcpu=native"
FLAGS = ("-std=gnu11", "-O3", NATIVE, "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wno-psabi")
COMPILE_LIMIT_S = 180.0
NUM_KEPT = 8  # libraries in the folder, with those of earlier versions and of other machines that share it
SHOWN_CHARACTERS = 500  # of a compiler's output


class Reason(StrEnum):
    """Why there is no library."""

    COMPILER = "there is no C compiler"
    COMPILING = "the compiler failed"
    FOLDER = "the cache folder cannot be used"
    LOADING = "the compiled library cannot be loaded"


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no library, and why."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def built() -> Path | Missing:
    """Return the library for this processor, compiled now if it is not there yet; takes seconds then."""
    folder = _folder()
    if isinstance(folder, Missing):
        return folder
    compiler = _compiler()
    if isinstance(compiler, Missing):
        return compiler
    sources = sorted(SOURCES.iterdir())
    path = folder / f"{_key(sources, compiler)}.so"
    if path.exists():
        return path
    try:
        with _locked(folder / ".lock"):
            return path if path.exists() else _compile(sources, compiler[0], path)
    except OSError as error:
        return Missing(Reason.FOLDER, why_unusable(error, folder, "XDG_CACHE_HOME"))


def _folder() -> Path | Missing:
    """Return the folder of libraries. Nobody else can write to it, because the libraries are run."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(cache) if cache else home_folder("XDG_CACHE_HOME") / ".cache") / "pdserve" / "kernels"
    except ConfigError as error:
        return Missing(Reason.FOLDER, str(error))
    try:
        make_own_folder(folder)
    except OSError as error:
        return Missing(Reason.FOLDER, why_unusable(error, folder, "XDG_CACHE_HOME"))
    return folder


def _compiler() -> tuple[str, str] | Missing:
    """Return the compiler's path, and its version."""
    asked = os.environ.get("CC")
    names = (asked,) if asked else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return Missing(Reason.COMPILER, f"looked for {', '.join(names)}")
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Missing(Reason.COMPILER, str(error))
    return path, shown.stdout


def _key(sources: list[Path], compiler: tuple[str, str]) -> str:
    digest = hashlib.sha256("\0".join((*compiler, *FLAGS, *_libraries(), *_processor())).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _processor() -> list[str]:
    """Return the lines of CPU_INFO that say which instructions there are, each once."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(PROCESSOR_LINES)})


def _libraries() -> list[str]:
    """Return the linker's arguments, with torch's OpenMP runtime if that has a name of its own.

    It has in wheels for aarch64, where the compiler's runtime would be a second one beside it.
    """
    torch = importlib.util.find_spec("torch")
    beside = Path(torch.origin).parents[1] / "torch.libs" if torch and torch.origin else None
    return ["-lm", "-Wl,--as-needed", *(str(path) for path in beside.glob("libgomp-*"))] if beside else ["-lm"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(sources: list[Path], compiler: str, path: Path) -> Path | Missing:
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    units = [str(source) for source in sources if source.suffix == ".c"]
    command = [compiler, *FLAGS, *units, *_libraries(), "-o", str(scratch)]
    out, said = subprocess.DEVNULL, subprocess.PIPE
    compiling = subprocess.Popen(command, stdout=out, stderr=said, text=True, start_new_session=True)
    try:
        _, complaints = compiling.communicate(timeout=COMPILE_LIMIT_S)
        if compiling.returncode:
            return Missing(Reason.COMPILING, complaints.strip()[:SHOWN_CHARACTERS])
        scratch.replace(path)
    except subprocess.TimeoutExpired:
        return Missing(Reason.COMPILING, f"it took longer than {COMPILE_LIMIT_S:g} s")
    finally:
        if compiling.poll() is None:
            os.killpg(compiling.pid, signal.SIGKILL)  # with the processes that the compiler has started
            compiling.communicate()
        scratch.unlink(missing_ok=True)
    for old in sorted(path.parent.glob("*.so"), key=lambda each: each.stat().st_mtime)[:-NUM_KEPT]:
        old.unlink(missing_ok=True)
    return path
