from collections.abc import Iterator
from pathlib import Path

import cluster_logs
import pytest

from pdserve.checkpoint.fetch import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Show what the cluster's processes logged with a test that fails while the cluster runs."""
    report = yield
    if report.failed:
        report.sections.extend((f"Log of {name}", text) for name, text in cluster_logs.of_running())
    return report
