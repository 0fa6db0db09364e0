"""The folder where models are kept, which processes of this and of other machines fill together.

A model is in it whole or not at all, and one process fetches it. The others wait for that one. Whoever fetches holds
the model's lock, checks every byte, and gives the model its name last.

The lock is flock's. The kernel frees it when its holder dies. NFS clients of Linux make it a lock of the server, so it
holds between machines (NFSv4; NFSv3 with its lock daemon; not mounted with `nolock` or `local_lock`). After the death
of a whole machine the server frees it once the machine's lease is over. POSIX's own locks would do the same, but a
process loses those as soon as it closes any descriptor of the file. Where a file system grants a lock to several at
once, they spoil one another's downloads. The digests show it, so that costs time and gives nobody a wrong model.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pdserve.base.errors import ConfigError
from pdserve.base.files import home_folder, why_unusable

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "PDSERVE_CACHE"
FOLDER_VARIABLE = "PDSERVE_DOWNLOAD_DIR"
WAIT_VARIABLE = "PDSERVE_FETCH_TIMEOUT_S"
WAIT_SETTING = f"--fetch-timeout-s or {WAIT_VARIABLE}"
WAIT_S = 3600.0  # some 400 GB at a gigabit per second
LOOK_EVERY_S = 0.2  # while another process has the lock: NFS tells nobody that one is free
CHUNK_BYTES = 2**20  # that are read or written at once

Progress = Callable[[float], None]  # gets the share done, from 0 to 1


def default_cache_dir() -> Path:
    """Return $PDSERVE_CACHE, or the folder pdserve of the user's caches."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME") or home_folder(f"{CACHE_VARIABLE} or XDG_CACHE_HOME") / ".cache"
    return Path(caches) / "pdserve"


@dataclass(frozen=True, slots=True)
class Home:
    """Where models are kept, and how long a process waits there for another one that fetches."""

    folder: Path | None = None  # None: the catalog's in pdserve's cache, the hub's in the cache of its own library
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        if not 0.0 <= self.wait_s < float("inf"):
            raise ConfigError(f"{WAIT_SETTING}: {self.wait_s} is no number of seconds, 0 or more")

    @classmethod
    def of_environment(cls) -> "Home":
        """Return what the variables say; ConfigError if a number is none."""
        given, wait = os.environ.get(FOLDER_VARIABLE), os.environ.get(WAIT_VARIABLE)
        try:
            return cls(Path(given).expanduser() if given else None, float(wait) if wait else WAIT_S)
        except ValueError as error:
            raise ConfigError(f"{WAIT_SETTING}: {wait} is no number of seconds, 0 or more") from error

    @property
    def setting(self) -> str:
        """Return what names another folder."""
        return f"--download-dir or {FOLDER_VARIABLE}" if self.folder else f"{CACHE_VARIABLE} or XDG_CACHE_HOME"

    @contextmanager
    def turn(self, path: Path) -> Iterator[None]:
        """Hold the lock of the model that is kept as `path`.

        ConfigError if others have held it for `wait_s`, or the folder cannot be written.
        """
        file = path.with_name(f".{path.name}.lock")
        with writing(path, self.setting):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file, self.wait_s, 0o664, poll_interval=LOOK_EVERY_S, fallback_to_soft=False)
            try:
                _acquire(lock, file, path)
            except Timeout as error:
                raise ConfigError(
                    f"{file}: {_holder(file)} has held this lock for more than {self.wait_s:g} s. "
                    f"Look what it does, or wait longer: {WAIT_SETTING}"
                ) from error
            try:
                file.write_text(f"process {os.getpid()} on {os.uname().nodename}\n", encoding="utf-8")
                yield
            finally:
                lock.release()


@contextmanager
def writing(path: Path, setting: str) -> Iterator[None]:
    """Turn errors of files into a ConfigError with the path at fault, below `path`, and the setting that helps."""
    try:
        yield
    except OSError as error:
        raise ConfigError(why_unusable(error, path, setting)) from error


def _acquire(lock: FileLock, file: Path, path: Path) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logger.warning("waiting for %s, which fetches %s", _holder(file), path)
        lock.acquire()


def _holder(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() or "another process"


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
