"""Which packages a process needs: routers, autoscalers and the command line do without those of workers."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
WORKERS = {"torch", "triton", "safetensors", "gguf", "nixl_cu12", "zmq"}
NEED_NONE = (
    *("router.server", "autoscaler.server", "launch.local", "checkpoint.open", "cli.app", "cli.running"),
    *("capacity.long_run", "capacity.planner", "measure.live", "measure.overload"),
)
RUN = "from pdserve.cli.app import main\nmain()"


def python(code: str, *arguments: object, missing: set[str]) -> subprocess.CompletedProcess[str]:
    """Run code where these packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.format(missing=missing) + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_routers_autoscalers_and_the_command_line_need_no_package_of_workers() -> None:
    code = "".join(f"import pdserve.{module}\n" for module in NEED_NONE)
    ended = python(code, missing={*WORKERS, "ray", "scipy"})
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("missing", ["torch", pytest.param("nixl_cu12", marks=pytest.mark.long)])
def test_a_worker_without_its_packages_names_the_extra_before_it_loads_anything(missing: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o600)
    flags = ("--model", tmp_path, "--secret-file", secret, "--worker-id", "d0", "--routers", "127.0.0.1:1")
    ended = python(RUN, "worker", "--role", "decode", *flags, missing={missing})
    assert ended.returncode == 2
    assert ended.stderr == f"pdserve: {missing} is not installed, and this needs it: pip install 'pdserve[worker]'\n"
