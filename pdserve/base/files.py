"""Reads and writes files that several processes use."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.base.ids import Incarnation

WRITABLE_BY_OTHERS = 0o022
EXPOSED = 0o026  # mode bits that let others read a file, or anybody but its owner write it
_FULL = {errno.ENOSPC, errno.EDQUOT}


def home_folder(setting: str) -> Path:
    """Return the user's home folder; ConfigError with what can be set instead where there is none, as in containers."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(f"HOME: this user has no home folder; set {setting}") from error


def why_unusable(error: OSError, path: Path, setting: str) -> str:
    """Return which file at or below `path` cannot be written, why, and that `setting` names another folder."""
    cure = "make room there, or set" if error.errno in _FULL else "set"
    problem = f"{error.filename or path}: {error.strerror or error}"
    return f"{problem}; {cure} {setting} to a folder that this user can write to"


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Put the path into errors of the operating system that name no file: a full disk's come from a write."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_file(path: Path, setting: str) -> bytes:
    """Return a file's content; ConfigError names the setting that has the path."""
    return _read(path, setting)[0]


def read_private(path: Path, setting: str) -> bytes:
    """Return a file's content; ConfigError unless it is private.

    The group may read it: for a process that is not root, Kubernetes mounts a secret as 0440, with the pod's group.
    """
    content, mode = _read(path, setting)
    if mode & EXPOSED:
        raise ConfigError(f"{setting}: {path} has mode {mode & 0o777:04o}; at most 0640 is private enough")
    return content


def _read(path: Path, setting: str) -> tuple[bytes, int]:
    """Return content and mode of the same file, even if it is replaced at that moment."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error


def name_process(file: Path | None, incarnation: Incarnation) -> None:
    """Write the incarnation where whoever launched this process finds it after its end."""
    if file is None:
        return
    try:
        file.write_text(f"{incarnation}\n", encoding="ascii")  # in place: on Kubernetes the file is a mount
    except OSError as error:
        raise ConfigError(f"termination_message_file: cannot write {file}: {error.strerror}") from error


def make_own_folder(path: Path) -> None:
    """Make a folder unless it exists; OSError if anybody but this user can write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EPERM, "others than this user may write to it", str(path))


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the content of `path`: a reader sees the old or the new content, nothing between.

    The umask applies to the mode, as for any file.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming_file(path):
            scratch.touch(mode)
            scratch.write_bytes(content.encode() if isinstance(content, str) else content)
            scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
