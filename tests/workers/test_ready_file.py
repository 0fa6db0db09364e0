"""A ready file is there while its process serves, and says nothing of another process."""

from pathlib import Path

import pytest
from stream_ends import Heard

from pdserve.errors import ConfigError
from pdserve.files import ReadyFile
from pdserve.proto.v1 import link_pb2 as link
from pdserve.virtual_time import VirtualClock
from pdserve.worker.link import FromRouter, Links
from pdserve.worker.messages import Load, RouterLost
from pdserve.worker.reporting import Reporter

SECRET = b"s" * 32


def load(*, draining: bool) -> Load:
    return Load(**{**dict.fromkeys(Load.__slots__, 0), "drain_reason": "", "draining": draining})


def test_a_worker_that_drains_for_whatever_reason_is_no_longer_ready(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    ready = ReadyFile(path)
    ready.write("{}")
    links = Links((), SECRET, link.Register(), Heard[FromRouter | RouterLost](), lambda _: None)
    reporter = Reporter(links, VirtualClock(), on_draining=ready.withdraw)
    reporter.beat(load(draining=False), 0)
    assert path.exists()
    reporter.beat(load(draining=True), 0)
    assert not path.exists()


def test_a_process_asked_to_drain_before_it_was_ready_never_counts_as_ready(tmp_path: Path) -> None:
    ready = ReadyFile(tmp_path / "ready.json")
    ready.withdraw()
    ready.write("{}")
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_successor_stays(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    with ReadyFile(path) as ready:
        ready.write("mine")
        ready.withdraw()
        ReadyFile(path).write("a successor's")
    assert path.read_text() == "a successor's"


def test_a_folder_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ready_file: cannot write into"):
        ReadyFile(tmp_path / "nowhere" / "ready.json").clear()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="ready_file: cannot replace"):
        ReadyFile(tmp_path / "folder").clear()


def test_a_file_that_cannot_be_removed_keeps_no_process_from_draining(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ready"
    with ReadyFile(path) as ready:
        path.mkdir()  # a folder cannot be unlinked
        ready.withdraw()
    assert caplog.text.count(f"ready_file: cannot remove {path}: ") == 1
