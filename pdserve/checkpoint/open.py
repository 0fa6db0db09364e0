"""Open a model from disk, by what lies there."""

from pathlib import Path

from pdserve.checkpoint import gguf_checkpoint, hf_directory
from pdserve.checkpoint.checkpoint import Checkpoint, naming
from pdserve.errors import ConfigError


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config and metadata of a Hugging Face directory, a .gguf file, or a directory holding exactly one.

    Needs neither torch nor numpy. Raises ConfigError naming the path and the key at fault.
    """
    try:
        with naming(path):
            return _open(path.expanduser())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError("is neither a directory nor a .gguf file")
        return gguf_checkpoint.open_file(path)
    if not path.is_dir():
        raise ConfigError("there is no such file or directory")
    if (path / "config.json").exists():
        return hf_directory.open_directory(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return gguf_checkpoint.open_file(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"holds {len(files)} GGUF files ({names}); name one of them")
    raise ConfigError("holds neither a config.json nor a .gguf file")
