"""Processes that fetch a model of the hub to one folder, from a hub on loopback."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_hub import REPOSITORY, FakeHub, fake_hub
from fetching import LIMIT_S, Process, done, refused
from looking import until
from mounts import mounted

pytestmark = pytest.mark.slow

WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = {name: json.dumps({"name": name}).encode() for name in ("config.json", "tokenizer.json")}
FILES |= {name: name.encode() * 2**16 for name in WEIGHTS}
Start = Callable[..., Process]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub(dict(FILES)) as hub:
        yield hub


@pytest.fixture
def start(hub: FakeHub, tmp_path: Path) -> Iterator[Start]:
    """Return what starts `pdserve models fetch` of the hub's model."""
    processes: list[Process] = []
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **variables, "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "pdserve", "models", "fetch", REPOSITORY]
    to_folder = ("--download-dir", str(tmp_path / "models"))

    def start_one(under: Sequence[str] = (), flags: Sequence[str] = to_folder) -> Process:
        whole, pipe = [*under, *command, *flags], subprocess.PIPE
        processes.append(subprocess.Popen(whole, env=environment, text=True, stdout=pipe, stderr=pipe))
        return processes[-1]

    yield start_one
    hub.go_on.set()
    for process in processes:
        process.kill()
        process.communicate()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_many_processes_download_each_file_once(hub: FakeHub, start: Start, tmp_path: Path) -> None:
    paths = {done(process) for process in [start() for _ in range(4)]}
    folder = tmp_path / "models" / "models--acme--tiny" / "snapshots" / "main"
    assert paths == {folder}
    assert Counter(hub.fetched) == dict.fromkeys(FILES, 1)
    assert contents(folder) == FILES
    assert {path.name for path in folder.parent.iterdir()} == {"main", ".main.lock"}


def test_what_a_killed_process_has_whole_is_kept_and_its_model_is_nobodys_before_the_last_file(
    hub: FakeHub, start: Start, tmp_path: Path
) -> None:
    hub.stalls_at = WEIGHTS[1]
    first = start()
    assert hub.stalled.wait(LIMIT_S)
    until(lambda: len(hub.fetched) == len(FILES) - 1)
    until(lambda: len([path for path in tmp_path.rglob("*.metadata") if path.stat().st_size]) == len(FILES) - 1)
    second = start()
    assert second.stderr
    until(lambda: f"waiting for process {first.pid}" in second.stderr.readline())  # type: ignore[union-attr]
    snapshots = tmp_path / "models" / "models--acme--tiny" / "snapshots"
    assert not (snapshots / "main").exists()
    hub.stalls_at = None
    first.send_signal(signal.SIGKILL)
    first.wait(LIMIT_S)
    assert contents(done(second)) == FILES
    assert Counter(hub.fetched) == dict.fromkeys(FILES, 1)
    assert {path.name for path in snapshots.iterdir()} == {"main", ".main.lock"}


@pytest.mark.parametrize("name", [pytest.param("config.json", marks=pytest.mark.long), WEIGHTS[0]])
def test_wrong_bytes_are_refused_with_both_digests_and_fetched_again(
    hub: FakeHub, start: Start, tmp_path: Path, name: str
) -> None:
    hub.sent[name] = bytes(reversed(FILES[name]))
    said = refused(start())
    assert name in said
    if name in WEIGHTS:
        for content in (FILES[name], hub.sent[name]):
            assert hashlib.sha256(content).hexdigest() in said
    assert not (tmp_path / "models" / "models--acme--tiny" / "snapshots" / "main").exists()
    hub.sent.clear()
    hub.fetched.clear()
    assert contents(done(start())) == FILES
    assert hub.fetched == [name]


def test_of_a_branch_that_moves_meanwhile_no_file_of_before_is_kept(hub: FakeHub, start: Start, tmp_path: Path) -> None:
    hub.sent["config.json"] = b"{}"
    refused(start())
    hub.sent.clear()
    hub.commit = "f" * 40
    hub.files = {"config.json": b"{ }", "model.safetensors": b"one"}
    path = done(start())
    assert contents(path) == hub.files
    assert {each.name for each in path.parent.iterdir()} == {"main", ".main.lock"}


def test_what_has_been_fetched_needs_no_hub_and_does_not_follow_its_branch(hub: FakeHub, start: Start) -> None:
    path = done(start())
    hub.fetched.clear()
    hub.commit = "f" * 40
    assert done(start()) == path
    assert hub.fetched == []


@pytest.mark.parametrize("folder", ["models", pytest.param("hf", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=1m", "No space left on device; make room there, or set"), ("ro", "Read-only file system; set")],
)
def test_a_folder_that_takes_no_model_is_named_with_what_moves_it(
    start: Start, tmp_path: Path, folder: str, options: str, reason: str
) -> None:
    where, setting = tmp_path / folder, {"models": "--download-dir or PDSERVE_DOWNLOAD_DIR", "hf": "HF_HOME"}[folder]
    where.mkdir()
    flags = ("--download-dir", str(where)) if folder == "models" else ()
    said = refused(start(mounted(options, where), flags))
    assert said.startswith(f"pdserve: {where}")
    assert f"{reason} {setting} to a folder" in said
