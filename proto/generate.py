"""Write the Python stubs of proto/v1 beside their sources. Usage: python proto/generate.py [OUT_FOLDER]

The stubs are checked in; a test generates them anew and compares.
"""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
# protoc names modules after source paths; ours live in the package, and `proto` alone is proto-plus.
BARE_IMPORT = re.compile(r"^(from|import) proto\.v1", re.MULTILINE)
# Calls without a stub, which protoc adds and nobody makes.
UNUSED = re.compile(r"\n\n # This class is part of an EXPERIMENTAL API\..*", re.DOTALL)


def generate(out: Path) -> None:
    """Write stubs of every proto into `out`, flat."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy")]
        flags.append(f"--mypy_grpc_out=only_async:{scratch}")  # pdserve makes no call that blocks
        include = str(files("grpc_tools") / "_proto")
        status = protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *flags, *sources])
        if status != 0:
            raise SystemExit(status)
        for stub in sorted((Path(scratch) / "proto" / "v1").iterdir()):
            text = BARE_IMPORT.sub(r"\1 pdserve.proto.v1", UNUSED.sub("", stub.read_text()))
            text = text.replace("proto.v1.", "pdserve.proto.v1.").replace("pdserve.pdserve.", "pdserve.")
            (out / stub.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "proto" / "v1")
