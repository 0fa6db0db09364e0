"""Small files that other processes read while this one replaces them."""

import logging
import os
from pathlib import Path
from typing import Self

from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path`: a reader sees the old or the new one, nothing between."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


class ReadyFile:
    """Exists while its process serves: from `write` to `withdraw`. Does nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._withdrawn = False

    def clear(self) -> None:
        """Remove what an earlier process left behind; ConfigError where this one could not write."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"ready_file: cannot replace {self._path}: {error.strerror}") from error
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"ready_file: cannot write into {self._path.parent}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.withdraw()

    def write(self, text: str) -> None:
        """Say that this process serves, unless that has been withdrawn."""
        if self._path is not None and not self._withdrawn:
            write_atomically(self._path, text)

    def withdraw(self) -> None:
        """Say, once and for good, that this process no longer serves. A later file is a successor's and stays."""
        withdrawn, self._withdrawn = self._withdrawn, True
        if self._path is None or withdrawn:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # running requests can be finished all the same
            logger.error("ready_file: cannot remove %s: %s", self._path, error.strerror)
