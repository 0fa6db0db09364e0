from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from worker_settings import built, settings_of_tiny

from pdserve.base.errors import ConfigError
from pdserve.engine.runner import zeroed
from pdserve.executor import memory


def faults_of_writing(pages: torch.Tensor) -> int:
    """Return how often the kernel had to give memory while all pages were written to."""
    before = getrusage(RUSAGE_SELF).ru_minflt
    pages.fill_(1)
    return getrusage(RUSAGE_SELF).ru_minflt - before


def new_pages() -> torch.Tensor:
    return zeroed((1000, 1 << 16), torch.uint8, torch.device("cpu"))


def test_pages_are_written_to_without_waiting_for_memory_and_keep_what_was_written_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = new_pages()
    pages[3] = 7
    with caplog.at_level("INFO"):
        memory.take_in_background(pages).join()
    if "Invalid argument" in caplog.text:
        pytest.skip("this kernel cannot")
    assert bool((pages[3] == 7).all())
    assert not pages[4:].any()
    if not (of_fresh_ones := faults_of_writing(new_pages())):
        pytest.skip("no faults are counted here")
    assert 4 * faults_of_writing(pages) < of_fresh_ones


def test_a_kernel_that_cannot_leaves_memory_to_the_first_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 9999)
    pages = new_pages()
    with caplog.at_level("INFO"):
        memory.take_in_background(pages).join()
    assert "Invalid argument" in caplog.text
    assert not pages.any()


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this process's control group, whose limit leaves 600 bytes, 150 of them in files' caches."""
    (tmp_path / "own").write_text("1:name=systemd:/\n0::/pod/worker\n")
    group = tmp_path / "pod" / "worker"
    group.mkdir(parents=True)
    for name, text in {"max": "1000", "current": "550", "stat": "anon 400\nactive_file 50\ninactive_file 100"}.items():
        (group / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUP", tmp_path / "own")
    return group


def test_what_a_control_group_leaves_is_all_there_is(limited: Path) -> None:
    assert memory.available_bytes() == 600
    (limited.parent / "memory.max").write_text("700")
    (limited.parent / "memory.current").write_text("550")
    (limited.parent / "memory.stat").write_text("active_file 0\ninactive_file 1")
    assert memory.available_bytes() == 151
    for group in (limited, limited.parent):
        (group / "memory.max").write_text("max")
    assert memory.available_bytes() > 1 << 20


@pytest.mark.parametrize(("field", "value"), [("num_pages", 1 << 22), ("kv_cache_memory_bytes", 1 << 40)])
def test_pages_for_which_no_memory_is_left_are_refused_before_the_worker_serves(
    limited: Path, tmp_path: Path, field: str, value: int
) -> None:
    assert limited.is_dir()
    config = settings_of_tiny(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=rf"^{field}: KV pages take \d+ bytes, and 600 are left beside the model"):
        built(config)
