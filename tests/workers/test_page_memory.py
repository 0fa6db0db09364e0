from resource import RUSAGE_SELF, getrusage

import pytest
import torch

from pdserve.engine.runner import zeroed
from pdserve.worker import page_memory


def faults_of_writing(pages: torch.Tensor) -> int:
    """Return how often the kernel had to give memory while all pages were written to."""
    before = getrusage(RUSAGE_SELF).ru_minflt
    pages.fill_(1)
    return getrusage(RUSAGE_SELF).ru_minflt - before


def new_pages() -> torch.Tensor:
    return zeroed((1000, 1 << 16), torch.uint8, torch.device("cpu"))


def test_pages_are_written_to_without_waiting_for_memory_and_keep_what_was_written_before() -> None:
    pages = new_pages()
    pages[3] = 7
    page_memory.take_in_background(pages).join()
    assert bool((pages[3] == 7).all())
    assert not pages[4:].any()
    assert 4 * faults_of_writing(pages) < faults_of_writing(new_pages())


def test_a_kernel_that_cannot_leaves_memory_to_the_first_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_memory, "_POPULATE_WRITE", 9999)
    pages = new_pages()
    with caplog.at_level("INFO"):
        page_memory.take_in_background(pages).join()
    assert "Invalid argument" in caplog.text
    assert not pages.any()
