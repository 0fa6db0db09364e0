"""What Python passes to the library has the fields that C reads, in their order: nothing else would notice."""

import ctypes
import re
from pathlib import Path

import pytest

from pdserve.kernels.cpu import attention, states
from pdserve.kernels.cpu.calls import Call, Kind, Mixture
from pdserve.kernels.cpu.ranks import RankMemory

SOURCES = Path(__file__).parents[2] / "kernels/cpu/src"


def without_comments(file: str) -> str:
    return re.sub(r"/\*.*?\*/", "", (SOURCES / file).read_text(), flags=re.DOTALL)


def fields_of(file: str, name: str) -> list[tuple[str, str]]:
    """Return a C structure's fields with what each is: a pointer, a double, an integer or another structure."""
    found = re.search(rf"struct {name} \{{(.*?)\n\}};", without_comments(file), re.DOTALL)
    assert found, f"struct {name} is not in {file}"
    fields = []
    for declared in filter(None, map(str.strip, found[1].split(";"))):
        kind, names = re.fullmatch(r"((?:const |_Atomic |struct )*\w+)\s+(.*)", declared, re.DOTALL).groups()  # type: ignore[union-attr]
        for each in names.split(","):
            is_pointer = "*" in each
            fields.append((each.strip(" *\n"), "pointer" if is_pointer else kind.split()[-1]))
    return fields


KINDS = {
    ctypes.c_void_p: "pointer",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_double: "double",
    Mixture: "mixture",
}


@pytest.mark.parametrize(
    ("structure", "file", "name"),
    [
        (Call, "calls.h", "call"),
        (Mixture, "calls.h", "mixture"),
        (attention._Step, "attention.h", "step"),
        (states._States, "states.h", "states"),
        (states._Run, "states.h", "run"),
        (states._Recurrence, "states.h", "recurrence"),
        (RankMemory, "ranks.c", "ranks"),
    ],
)
def test_structures_have_the_fields_of_those_in_c(structure: type[ctypes.Structure], file: str, name: str) -> None:
    ours = [(field[0], KINDS[field[1]]) for field in structure._fields_]
    assert ours == fields_of(file, name)


def test_kinds_of_calls_are_numbered_as_in_c() -> None:
    listed = re.search(r"enum \{(.*?)\}", without_comments("calls.h"), re.DOTALL)
    assert listed
    assert [kind.name for kind in Kind] == [name.strip() for name in listed[1].split(",")]
    assert [kind.value for kind in Kind] == list(range(len(Kind)))
