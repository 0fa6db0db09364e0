"""What every test needs to run where it is: no GPU, no test that needs one."""

import gc
import importlib.util
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

import pdserve  # noqa: F401 - before gRPC, which reads from it how to take forks

# Before torch is loaded: threads that spin for long would take the cores that a cluster's processes need.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# Processes of tests share out the cores: threads of several that spin on the same ones wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)

# No deadlines: on a busy machine an example takes as long as others let it. `make test` tries few examples, and the
# same ones every time; `make test-long` tries others, and as many as Hypothesis does by itself.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("any", deadline=None)
settings.load_profile("any")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected: nearly all that is made then stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415

    return torch.cuda.is_available()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread: on busy cores, threads would wait for each other at each of torch's small products."""
    import torch  # noqa: PLC0415 - few tests need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
