"""Files are read as a whole, with the mode that they themselves have, and again when they have changed."""

import os
import pwd
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
from mounts import mounted

from pdserve.base.errors import ConfigError
from pdserve.base.files import read_private
from pdserve.base.watched_files import Watched
from pdserve.checkpoint.home import default_cache_dir


def test_a_file_that_was_refused_for_its_mode_is_read_once_the_mode_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    path.write_bytes(b"one")
    watched = Watched((path,), partial(read_private, path, "key"))
    path.chmod(0o644)
    path.write_bytes(b"two")
    assert (watched.look(), watched.num_refused) == (b"one", 1)
    path.chmod(0o600)
    assert (watched.look(), watched.num_refused) == (b"two", 1)


def test_who_reads_slowly_does_not_put_back_what_another_thread_has_read_since(tmp_path: Path) -> None:
    path, begun, go_on = tmp_path / "file", Event(), Event()
    path.write_bytes(b"one")

    def read() -> bytes:
        content = path.read_bytes()
        if content == b"second":
            begun.set()
            assert go_on.wait(10)
        return content

    watched = Watched((path,), read)
    path.write_bytes(b"second")
    readers = [Thread(target=watched.look)]
    readers[0].start()
    assert begun.wait(10)
    path.write_bytes(b"the third")
    readers.append(Thread(target=watched.look))
    readers[1].start()
    readers[1].join(0.1)  # it waits, or has read the third already
    go_on.set()
    for reader in readers:
        reader.join()
    assert watched._content == b"the third"


@pytest.mark.parametrize(("mode", "successors"), [(0o600, None), (0o600, 0o644), (0o644, 0o600)])
def test_a_file_that_another_replaces_while_it_is_read_is_judged_by_its_own_mode(
    tmp_path: Path, mode: int, successors: int | None
) -> None:
    path = tmp_path / "file"
    os.mkfifo(path)
    path.chmod(mode)

    def write() -> None:
        with path.open("wb") as file:  # once the reader has opened it
            path.unlink()
            if successors is not None:
                path.touch()
                path.chmod(successors)
            file.write(b"content")

    writer = Thread(target=write)
    writer.start()
    if mode == 0o600:
        assert read_private(path, "key") == b"content"
    else:
        with pytest.raises(ConfigError, match=r"^key: .* mode 0644"):
            read_private(path, "key")
    writer.join()


def test_a_full_disk_is_named_though_its_error_names_no_file(tmp_path: Path) -> None:
    code = "import sys, pathlib, pdserve.base.files as f; f.write_atomically(pathlib.Path(sys.argv[1]), bytes(2**16))"
    path = tmp_path / "state"
    command = [*mounted("size=4k", tmp_path), sys.executable, "-P", "-c", code, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == f"OSError: [Errno 28] No space left on device: '{path}'"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container with a user id of its own."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for variable in ("HOME", "PDSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=re.escape("no home folder; set PDSERVE_CACHE or XDG_CACHE_HOME")):
        default_cache_dir()
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
