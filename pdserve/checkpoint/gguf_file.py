"""Read the header of a GGUF file: its metadata, and where its tensors lie.

The `gguf` package reads headers too, but makes a numpy array of each string. For a vocabulary that takes seconds, in
every process that only needs the tokenizer. Its dequantizers are used to read weights.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
FLOAT_KINDS = (0, 1, 28, 30)  # ggml's numbers of float32, float16, float64 and bfloat16

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies, and how its numbers are coded."""

    name: str
    shape: tuple[int, ...]  # outermost first, as in numpy
    kind: int  # ggml's number for the coding
    offset_bytes: int  # from the start of the file

    @property
    def is_quantized(self) -> bool:
        """Whether its numbers have fewer bits than floats have."""
        return self.kind not in FLOAT_KINDS


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's header."""

    path: Path
    metadata: dict[str, object]  # bool, int, float, str, or a list of one of them
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read the header; ConfigError if the file is no GGUF file or is cut short."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ConfigError("is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(path, _Cursor(data))
            except (struct.error, UnicodeDecodeError, KeyError) as error:
                raise ConfigError(f"is damaged or cut short within its header ({error})") from error


def _read(path: Path, cursor: "_Cursor") -> GgufFile:
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ConfigError(f"is GGUF version {version}; supported are {VERSIONS}, little-endian")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [cursor.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"general.alignment: {alignment!r} is not a positive integer")
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos)
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """Reads one value after another; struct.error at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = len(MAGIC)

    def number(self, code: str) -> int:
        value: int = self._unpack("<" + code)[0]
        return value

    def text(self) -> str:
        start = self.position + 8
        end = start + self.number("Q")
        if end > len(self._data):
            raise struct.error("a string goes beyond the end")
        self.position = end
        return self._data[start:end].decode()

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array()
        value: object = self._unpack("<" + SCALARS[kind])[0]
        return value

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        num_dimensions = self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise struct.error(f"a tensor of {num_dimensions} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(num_dimensions)]))
        return name, shape, self.number("I"), self.number("Q")

    def _array(self) -> list[object]:
        kind, count = self.number("I"), self.number("Q")
        if kind == ARRAY:
            raise struct.error("an array of arrays")
        if kind in SCALARS:
            return list(self._unpack(f"<{count}{SCALARS[kind]}"))
        return [self.value(kind) for _ in range(count)]

    def _unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return values
