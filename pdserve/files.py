"""Small files that processes read while others replace them."""

import os
from pathlib import Path

from pdserve.errors import ConfigError

EXPOSED = 0o026  # modes of a private file that others could read, or anybody but its owner replace


def read_file(path: Path, setting: str) -> bytes:
    """Return a file's content; ConfigError names the setting that names the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error


def read_private(path: Path, setting: str) -> bytes:
    """Return a file's content; ConfigError unless it is private.

    Its group may read it: Kubernetes mounts a secret for a process that is not root as 0440, with the pod's group.
    """
    content = read_file(path, setting)
    mode = path.stat().st_mode
    if mode & EXPOSED:
        raise ConfigError(f"{setting}: {path} has mode {mode & 0o777:04o}; at most 0640 is private enough")
    return content


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path`: a reader sees the old or the new one, nothing between."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
