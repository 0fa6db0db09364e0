"""The compiled library, which every machine that runs the tests can build: it has a C compiler."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_cases import long

from pdserve.kernels.cpu.build import CPU_INFO, FLAGS, NATIVE, SOURCES, Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import has_matrix_unit, use_matrix_unit
from pdserve.kernels.cpu.library import library


@pytest.fixture(scope="session")
def loaded() -> ctypes.CDLL:
    found = library()
    assert not isinstance(found, Missing), found
    return found


@pytest.fixture(scope="module", params=["as it is", "vectors"])
def either(loaded: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """Return the library as the processor has it, then without its matrix unit."""
    if request.param == "vectors" and not has_matrix_unit(loaded):
        pytest.skip("this processor has vectors alone")
    use_matrix_unit(loaded, wanted=request.param != "vectors")
    yield loaded
    use_matrix_unit(loaded, wanted=True)


@pytest.fixture(scope="session")
def calls(loaded: ctypes.CDLL) -> Immediate:
    return Immediate(loaded)


PROCESSORS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "cooperlake")


@pytest.fixture(scope="session", params=long(*PROCESSORS))
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the library as processors with less than AVX-512 BF16 and VNNI get it, but for the optimizing."""
    if NATIVE != "-march=native" or " avx2 " not in CPU_INFO.read_text():
        pytest.skip("this processor does not have these instructions")
    path = tmp_path_factory.mktemp("narrow") / "library.so"
    others = {NATIVE: f"-march={request.param}", "-O3": "-O1"}
    units = [str(unit) for unit in sorted(Path(SOURCES).glob("*.c"))]
    flags = [others.get(flag, flag) for flag in FLAGS]
    subprocess.run(["gcc", *flags, "-Wextra", "-Werror", *units, "-lm", "-o", str(path)], check=True)
    needed = {"x86-64-v4": " avx512bw ", "cooperlake": " avx512_bf16 "}.get(request.param, "")
    if needed not in CPU_INFO.read_text():
        pytest.skip(f"compiles, but this processor has no{needed}")
    return ctypes.CDLL(str(path))
