"""Digest whole weight files: equal digests mean equal bytes.

A file's digest is remembered in the user's cache under what changes when the file does: device, inode, size, and the
times of its last modification and status change. The first of these two can be put back, as unpacking an archive does;
the second cannot. Losing or failing to write the cache costs time alone.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import xxhash

from pdserve.files import write_atomically

PART_BYTES = 2**25  # hashed by one thread at a time
READ_BYTES = 2**20  # fits a core's cache
MAX_THREADS = 8
MAX_REMEMBERED = 256
SETTLED_S = 2.0  # a file changed later than that may change again without its time showing it


def file_digest(path: Path, cache_dir: Path, wall_clock: Callable[[], float] = time.time) -> str:
    """Return a digest of the file's bytes, XXH3 over XXH3 digests of its parts; OSError if it cannot be read."""
    stat = path.stat()
    known_by = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    remembered = cache_dir / "-".join(f"{number:x}" for number in known_by)
    digest = _read(remembered)
    if digest is None:
        digest = _computed(path, stat.st_size)
        if wall_clock() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S:
            _remember(remembered, digest)
    return digest


def _computed(path: Path, size: int) -> str:
    starts = range(0, size, PART_BYTES)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "fingerprint") as threads:
        parts = b"".join(threads.map(_part_digest, repeat(path), starts))
    return xxhash.xxh3_128_hexdigest(parts + size.to_bytes(8, "little"))


def _part_digest(path: Path, start: int) -> bytes:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = PART_BYTES
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            hasher.update(buffer[:count])
            left -= count
    return hasher.digest()


def _read(remembered: Path) -> str | None:
    try:
        digest = remembered.read_text()
        os.utime(remembered)  # the least recently used go first
    except (OSError, ValueError):
        return None
    is_whole = len(digest) == 2 * xxhash.xxh3_128().digest_size and digest.isalnum()
    return digest if is_whole else None


def _remember(target: Path, digest: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, digest)
        by_age = sorted(target.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in by_age[MAX_REMEMBERED:]:
            file.unlink(missing_ok=True)
    except OSError:
        return  # a cache that cannot be written
