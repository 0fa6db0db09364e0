"""One wheel, one name at its top, and nothing in it that needs the tree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "router" / "frontend" / "static"
COMPONENTS = ("router", "prefill_worker", "decode_worker", "kvtransfer", "kernels", "proto", "launch", "kubernetes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the tracked files alone, with the setuptools that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source, out = folder / "source", folder / "out"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    copy = ["tar", "--null", "--files-from=-", "-cf", str(folder / "tree.tar")]
    subprocess.run(copy, cwd=ROOT, check=True, input=tracked)
    source.mkdir()
    subprocess.run(["tar", "-xf", str(folder / "tree.tar"), "-C", str(source)], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(out), str(source)], check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_one_name_at_its_top(names: list[str]) -> None:
    top = {name.split("/", maxsplit=1)[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pdserve"}
    assert len(top) == 2


def test_the_wheel_holds_every_component_its_protos_its_c_sources_and_its_types(names: list[str]) -> None:
    assert "pdserve/py.typed" in names
    for component in COMPONENTS:
        assert any(name.startswith(f"pdserve/{component}/") for name in names), component
    protos = [f"pdserve/proto/v1/{path.name}" for path in (ROOT / "proto" / "v1").glob("*.proto")]
    sources = [f"pdserve/kernels/cpu/src/{path.name}" for path in (ROOT / "kernels" / "cpu" / "src").iterdir()]
    assert protos
    assert sources
    assert {*protos, *sources} <= set(names)


def test_the_wheel_holds_the_files_of_the_live_page(names: list[str]) -> None:
    files = {f"pdserve/router/frontend/static/{path.name}" for path in PAGE.iterdir()}
    assert files <= set(names)
    assert any(name.endswith("index.html") for name in files)


def test_the_wheel_holds_neither_tests_nor_caches(names: list[str]) -> None:
    assert [name for name in names if "test" in name or "__pycache__" in name] == []


def test_the_wheel_runs_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import pdserve, pdserve.capacity.cluster, pdserve.kernels, pdserve.launch.plan, pdserve.proto.v1.link_pb2\n"
        f"assert pdserve.__file__.startswith({str(target)!r}), pdserve.__file__\n"
        "from pdserve.cli.app import main\n"
        "sys.argv = ['pdserve', 'models', 'list']\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "smollm2" in ended.stdout
