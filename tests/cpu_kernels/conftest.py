"""The compiled library, which every machine that runs the tests can build: it has a C compiler."""

import ctypes

import pytest

from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library


@pytest.fixture(scope="session")
def loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, Missing), found
    return found
