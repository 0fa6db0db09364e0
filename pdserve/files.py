"""Small files that other processes read while this one replaces them."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path`: a reader sees the old or the new one, nothing between."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
