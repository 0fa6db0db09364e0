"""Run the kernels on the CPU, through Triton's interpreter, which must be chosen before they are imported."""

import os
import sys

import pytest

assert "pdserve.kernels.device.attention" not in sys.modules, "kernels were imported before the interpreter was chosen"
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def debugging_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the costly checks to the tests that ask for them."""
    monkeypatch.delenv("PDSERVE_KERNEL_DEBUG", raising=False)
