"""Reads and writes files that several processes use."""

import os
from pathlib import Path

from pdserve.errors import ConfigError

WRITABLE_BY_OTHERS = 0o022
EXPOSED = 0o026  # mode bits that let others read a file, or anybody but its owner write it


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


def make_own_folder(path: Path) -> None:
    """Make a folder unless it exists; OSError if anybody but this user can write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(f"{path}: others than this user may write to it")


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the content of `path`: a reader sees the old or the new content, nothing between.

    The umask applies to the mode, as for any file.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.touch(mode)
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
