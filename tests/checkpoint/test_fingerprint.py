"""A file's digest follows every byte of it, and what is remembered of a file never outlives a change to it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.checkpoint import checkpoint
from pdserve.checkpoint.checkpoint import PART_BYTES, Checkpoint, file_digest
from pdserve.checkpoint.open import open_checkpoint
from pdserve.errors import ConfigError

SIZE = PART_BYTES + 3 * 2**20 + 7
LONG_SETTLED = 1e12


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def settled() -> float:
    return LONG_SETTLED


def write_at(path: Path, place: int, value: bytes) -> None:
    """Change a byte and put the time of modification back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(value)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    while path.stat().st_ctime_ns == stat.st_ctime_ns:  # the clock of files ticks every few milliseconds
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 2**20, 2**21 + 5, SIZE // 2, PART_BYTES - 1, PART_BYTES, SIZE - 1])
def test_a_byte_that_differs_anywhere_shows(file: Path, cache: Path, place: int) -> None:
    before = file_digest(file, cache, lambda: 0.0)
    write_at(file, place, b"\x01")
    assert file_digest(file, cache, lambda: 0.0) != before


def test_parts_that_change_places_show(file: Path, cache: Path) -> None:
    write_at(file, 0, b"\x01")
    before = file_digest(file, cache, lambda: 0.0)
    write_at(file, 0, b"\x00")
    write_at(file, PART_BYTES, b"\x01")
    assert file_digest(file, cache, lambda: 0.0) != before


def test_a_settled_file_is_hashed_once(file: Path, cache: Path) -> None:
    file_digest(file, cache, settled)
    (remembered,) = cache.iterdir()
    remembered.write_text("ab" * 16)
    assert file_digest(file, cache, settled) == "ab" * 16


def test_a_file_whose_time_of_modification_was_put_back_is_hashed_again(file: Path, cache: Path) -> None:
    before = file_digest(file, cache, settled)
    write_at(file, 5, b"\x01")
    assert file_digest(file, cache, settled) != before


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(0, 1)), lambda path: path.write_bytes(b"shorter")])
def test_a_change_of_time_or_size_has_it_hashed_again(
    file: Path, cache: Path, change: Callable[[Path], object]
) -> None:
    before = file_digest(file, cache, settled)
    write_at(file, 5, b"\x01")
    change(file)
    assert file_digest(file, cache, settled) != before


def test_a_file_changed_just_before_is_not_remembered(file: Path, cache: Path) -> None:
    just_now = file.stat().st_mtime + 1.0
    before = file_digest(file, cache, lambda: just_now)
    write_at(file, 5, b"\x01")
    assert file_digest(file, cache, lambda: just_now) != before


@pytest.mark.parametrize("content", ["", "ff", "\n" * 32, "\x00" * 32])
def test_a_broken_memory_is_not_believed(file: Path, cache: Path, content: str) -> None:
    before = file_digest(file, cache, settled)
    (remembered,) = cache.iterdir()
    remembered.write_text(content)
    assert file_digest(file, cache, settled) == before


def test_a_cache_that_cannot_be_written_costs_time_alone(file: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert file_digest(file, cache, settled) == file_digest(file, cache, settled)


def test_the_cache_keeps_what_was_used_last(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_REMEMBERED", 3)
    for second in range(5):
        os.utime(file, ns=(0, second))
        file_digest(file, cache, settled)
    assert len(list(cache.iterdir())) == 3


def test_fine_tunes_that_differ_in_the_middle_of_the_file_do_not_pair(
    smollm2: Checkpoint, smollm2_file: Path, tmp_path: Path
) -> None:
    content = bytearray(smollm2_file.read_bytes())
    copied, tuned = tmp_path / "copied.gguf", tmp_path / "tuned.gguf"
    copied.write_bytes(content)
    content[len(content) // 2] ^= 1
    tuned.write_bytes(content)
    assert open_checkpoint(copied).fingerprint == smollm2.fingerprint
    assert open_checkpoint(tuned).fingerprint != smollm2.fingerprint


def test_weights_that_cannot_be_read_are_named(smollm2_file: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone.gguf"
    gone.write_bytes(smollm2_file.read_bytes())
    checkpoint = open_checkpoint(gone)
    gone.unlink()
    with pytest.raises(ConfigError, match=r"gone\.gguf: No such file"):
        _ = checkpoint.fingerprint
