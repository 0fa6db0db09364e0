from collections.abc import Callable

import pytest
from model_zoo import write_model

from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.hf_directory import open_directory


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Return what writes and opens a model."""
    return lambda family, **shape: open_directory(write_model(family, tmp_path_factory.mktemp(family), **shape))
