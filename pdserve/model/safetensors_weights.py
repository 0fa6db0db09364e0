"""Read a Hugging Face directory's safetensors, one file or several, one tensor at a time."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def iterate_safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the directory's checkpoint; ConfigError names a file that is missing or broken."""
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors ({error})") from error


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise ConfigError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [directory / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: not an index of safetensors files") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index}: {name!r} is not the name of a file beside it")
        if not (directory / name).is_file():
            raise ConfigError(f"{directory / name}: named in {INDEX_FILE} but missing")
    return [directory / name for name in names]
