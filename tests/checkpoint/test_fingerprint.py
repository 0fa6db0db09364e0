"""A file's digest follows every byte of it."""

from pathlib import Path

import pytest

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import PART_BYTES, Checkpoint, file_digest
from pdserve.checkpoint.open import open_checkpoint

SIZE = PART_BYTES + 3 * 2**20 + 7


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    return path


def write_at(path: Path, place: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(value)


@pytest.mark.parametrize("place", [0, 2**20, 2**21 + 5, SIZE // 2, PART_BYTES - 1, PART_BYTES, SIZE - 1])
def test_a_byte_that_differs_anywhere_shows(file: Path, place: int) -> None:
    before = file_digest(file)
    write_at(file, place, b"\x01")
    assert file_digest(file) != before


def test_parts_that_change_places_show(file: Path) -> None:
    write_at(file, 0, b"\x01")
    before = file_digest(file)
    write_at(file, 0, b"\x00")
    write_at(file, PART_BYTES, b"\x01")
    assert file_digest(file) != before


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


def test_a_file_that_is_gone_before_it_is_read_is_named(file: Path) -> None:
    file.unlink()
    with pytest.raises(ConfigError, match=r"weights: No such file"):
        file_digest(file)
