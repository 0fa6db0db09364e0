from collections.abc import Iterator
from pathlib import Path

import cluster_logs
import pytest
from model_zoo import load_oracle, write_model
from transformers import PreTrainedModel

from pdserve.checkpoint.fetch import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: a Llama, or of the test module's MODEL_FAMILY, and of its MODEL_SHAPE where it has one."""
    family: str = getattr(request.module, "MODEL_FAMILY", "llama3")
    shape: dict[str, int] = getattr(request.module, "MODEL_SHAPE", {})
    return write_model(family, tmp_path_factory.mktemp("model") / family, **shape)


@pytest.fixture(scope="module")
def oracle(model: Path) -> PreTrainedModel:
    return load_oracle(model)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Show what the cluster's processes logged with a test that fails while the cluster runs."""
    report = yield
    if report.failed:
        report.sections.extend((f"Log of {name}", text) for name, text in cluster_logs.of_running())
    return report
