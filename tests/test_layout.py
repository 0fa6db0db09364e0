"""The tree keeps its shape: components at the top, linked into the package, in files that can be read."""

import ast
import os
import re
import subprocess
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
LINKS = {
    "router": "../router",
    "prefill_worker": "../prefill_worker",
    "decode_worker": "../decode_worker",
    "kvtransfer": "../kvtransfer",
    "kernels": "../kernels",
    "proto": "../proto",
    "autoscaler": "../deploy/autoscaler",
    "kubernetes": "../deploy/kubernetes",
    "launch": "../deploy/launch",
}
DEVICE_CODE = ROOT / "kernels" / "device"  # a Triton kernel cannot be cut into functions at will
IN_NO_WHEEL = {ROOT / "tests" / "simulator" / "faultsim", ROOT / "tests" / "laboratory" / "lab"}  # packages
MAX_LINES = 350
MAX_FUNCTION_LINES = 60


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def sources() -> list[Path]:
    return [path for path in tracked("*.py") if "_pb2" not in path.name]


def test_components_are_linked_into_the_package() -> None:
    links = {path.name: str(path.readlink()) for path in (ROOT / "pdserve").iterdir() if path.is_symlink()}
    assert links == LINKS


def test_ci_runs_the_checks_and_the_tests() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").endswith(" make check test\n")


def test_no_test_is_skipped_for_want_of_a_package() -> None:
    skipping = "pytest.import" + "orskip"
    assert [path.name for path in tracked("tests/*.py") if skipping in path.read_text(encoding="utf-8")] == []


def test_what_is_said_to_be_pure_is_kept_so() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = {each["name"]: each for each in tools["importlinter"]["contracts"]}
    listed = tuple(f"{each}." for each in contracts["Decisions are pure"]["source_modules"])
    files = [Path(folder, name) for folder, _, names in os.walk(ROOT / "pdserve", followlinks=True) for name in names]
    pure = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files
        if path.suffix == ".py"
        and "_pb2" not in path.name
        and re.search(r"\bPure\.", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    ]
    assert len(pure) > 40
    assert [module for module in pure if not f"{module}.".startswith(listed)] == []


def test_no_imports_go_in_a_circle() -> None:
    """Imports within functions count; those that only name types do not."""
    graph = grimp.build_graph("pdserve", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 300
    TopologicalSorter(imports).prepare()  # a CycleError names the modules of a circle


def test_each_room_says_what_it_is_for_and_where_to_begin() -> None:
    wrong: list[str] = []
    for path in [path for path in tracked("*/__init__.py") if ROOT / "tests" not in path.parents]:
        text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
        named = re.findall(r"`([\w/]+\.py)`", text)
        places = (path.parent, ROOT, ROOT / "pdserve")
        wrong += [f"{path}: {name}" for name in named if not any((place / name).exists() for place in places)]
        if path.parent.parent in (ROOT, ROOT / "pdserve", ROOT / "deploy") and "Begin at `" not in text:
            wrong.append(f"{path}: it does not say where to begin")
    assert wrong == []


def test_no_file_is_too_long_to_read() -> None:
    own = [path for path in sources() if ROOT / "tests" not in path.parents]
    too_long = {str(path.relative_to(ROOT)): count_lines(path) for path in own if count_lines(path) > MAX_LINES}
    assert too_long == {}


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_function_is_too_long_to_read() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}"
        for path in sources()
        if DEVICE_CODE not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def test_modules_of_tests_have_names_of_their_own_and_no_packages() -> None:
    tests = [path for path in tracked("tests/**/*.py", "tests/*.py") if not IN_NO_WHEEL & set(path.parents)]
    assert [path for path in tests if path.name == "__init__.py"] == []
    repeated = [name for name, count in Counter(path.name for path in tests).items() if count > 1]
    assert [name for name in repeated if name != "conftest.py"] == []


def test_every_module_says_what_it_does() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if ROOT / "tests" not in path.parents
        and path.read_text(encoding="utf-8").strip()
        and ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert silent == []


def test_nothing_reads_pickles() -> None:
    banned = ("import pickle", "torch.load(", "import dill", "import marshal")
    own = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in sources()
        for word in banned
        if path != own and word in path.read_text(encoding="utf-8")
    ]
    assert found == []


def test_links_between_pages_lead_somewhere() -> None:
    link = re.compile(r"\]\(([^)#:]+)[)#]")
    links = [(page, to) for page in tracked("*.md") for to in link.findall(page.read_text(encoding="utf-8"))]
    assert len(links) > 10
    assert [(page.name, to) for page, to in links if not (page.parent / to).exists()] == []


def test_the_architecture_shows_the_layers_that_imports_are_held_to() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert "\n".join(f"    {layer.replace('pdserve.', '')}" for layer in layers) in page
