from pathlib import Path

import pytest

from pdserve.checkpoint.fetch import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve_model("smollm2-135m-instruct")
