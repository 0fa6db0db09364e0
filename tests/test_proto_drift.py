"""The checked-in stubs are what the pinned generator makes of the protos."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # protoc finds mypy-protobuf's plugins there
    generate = [sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)]
    subprocess.run(generate, check=True, env={"PATH": path}, capture_output=True)
    generated = {stub.name: stub.read_text() for stub in tmp_path.iterdir()}
    checked_in = {stub.name: stub.read_text() for stub in (ROOT / "proto" / "v1").glob("*_pb2*.py*")}
    assert sorted(generated) == sorted(checked_in)
    differing = [name for name, text in generated.items() if checked_in[name] != text]
    assert differing == [], "run python proto/generate.py"
