"""Files that are read again when they have changed."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)

_Content = TypeVar("_Content")
_Stamp = tuple[tuple[int, ...], ...]


class Watched(Generic[_Content]):
    """The content of some files, read again when they have changed.

    Nothing watches in the background: each look compares what the file system says of the files. Files that cannot be
    read, or make no sense together, leave in force what was read before.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], _Content]) -> None:
        """`read` raises ConfigError where the files are refused, which here goes to the caller."""
        self._paths = paths
        self._read = read
        self._stamp = self._now()
        self._content = read()
        self._reading = threading.Lock()  # else a slow reader could put back what another has replaced
        self.num_refused = 0  # how often files that had changed were refused

    def look(self) -> _Content:
        """Return the files' present content; from any thread."""
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
    """Return what differs between versions of a file; links are followed, as Kubernetes swaps them."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)  # a change of mode shows in ctime alone
