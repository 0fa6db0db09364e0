"""Files that are read again when they have changed."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pdserve.base.errors import ConfigError

logger = logging.getLogger(__name__)

_Content = TypeVar("_Content")
_Stamp = tuple[tuple[int, ...], ...]


class Watched(Generic[_Content]):
    """The content of some files, read again when they have changed.

    Nothing watches in the background: each `look` compares the files' times and sizes. If changed files cannot be read,
    or do not fit together, the content that was read before stays in force.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], _Content]) -> None:
        """`read` raises ConfigError if it refuses the files. Here the error goes to the caller."""
        self._paths = paths
        self._read = read
        self._stamp = self._now()
        self._content = read()
        self._reading = threading.Lock()  # else a slow reader could put back old content
        self.num_refused = 0  # how often changed files were refused

    def look(self) -> _Content:
        """Return the files' present content. Any thread may call this."""
        if self._now() != self._stamp:
            with self._reading:
                self._read_again()
        return self._content

    def _read_again(self) -> None:
        stamp = self._now()
        if stamp == self._stamp:
            return  # another thread has read it
        self._stamp = stamp
        try:
            self._content = self._read()
        except ConfigError as error:
            self.num_refused += 1
            logger.error("%s; what was read before stays in force", error)
        else:
            logger.info("%s has changed and was read again", self._paths[0])

    def _now(self) -> _Stamp:
        return tuple(_stamp_of(path) for path in self._paths)


def _stamp_of(path: Path) -> tuple[int, ...]:
    """Return values that differ between versions of a file. Links are followed: Kubernetes swaps links."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)  # a changed mode shows only in ctime
