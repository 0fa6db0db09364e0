"""Check every kernel on this machine's GPU, then time it beside what torch offers.

    python3 tests/gpu/run_gpu.py [check] [bench] [tune] [--only TEXT]

Needs torch, triton, numpy and safetensors. Prints short tables; all figures go to $OUT/kernels.json where OUT is set.
It also works in a copy of the tree that lost its links.
"""

import argparse
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpu_report import Row

    Section = tuple[str, str, Callable[[str], list[Row]]]  # its name, the argument that asks for it, and what runs it

GROUPS = ("check", "bench", "tune")


def main() -> int:
    """Run the sections asked for (check and bench by default); returns 1 if a case failed, or none was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="check, bench, tune; by default check and bench")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    unknown = set(arguments.sections).difference(GROUPS)
    if unknown:
        parser.error(f"no section is called {', '.join(sorted(unknown))}: there are {', '.join(GROUPS)}")
    _find_package()
    import gpu_report  # noqa: PLC0415 - the package is only now importable

    if not gpu_report.has_gpu():
        sys.stderr.write("no CUDA device: nothing to do\n")
        return 2
    results: dict[str, object] = {"machine": gpu_report.machine(), "clocks_before": gpu_report.clocks()}
    sys.stdout.write(json.dumps(results) + "\n")

    def save(tables: "dict[str, list[Row]]") -> None:
        if "OUT" in os.environ:
            results.update({name: [asdict(row) for row in rows] for name, rows in tables.items()})
            results["clocks_after"] = gpu_report.clocks()
            Path(os.environ["OUT"], "kernels.json").write_text(json.dumps(results, indent=1))

    is_well = run_sections(_sections(), arguments.sections or GROUPS[:2], arguments.only, save)
    sys.stdout.write("all well\n" if is_well else "FAILED\n")
    return int(not is_well)


def run_sections(
    sections: "list[Section]", groups: "Collection[str]", only: str, save: "Callable[[dict[str, list[Row]]], None]"
) -> bool:
    """Run the sections of some groups; return whether any case was run, and none failed.

    One that raises counts as a case that failed. What is known is saved after each.
    """
    from gpu_report import Row, table  # noqa: PLC0415 - the package is only now importable

    tables = {}
    for name, group, run in sections:
        if group in groups:
            try:
                tables[name] = run(only)
            except Exception as error:  # noqa: BLE001 - the figures of the others count
                traceback.print_exc()
                tables[name] = [Row(name, note=f"{type(error).__name__}: {error}", failed=True)]
            sys.stdout.write(table(name, tables[name]))
            sys.stdout.flush()
            save(tables)
    rows = [row for rows in tables.values() for row in rows]
    return bool(rows) and not any(row.failed for row in rows)


def _sections() -> "list[Section]":
    import gpu_attention  # noqa: PLC0415
    import gpu_checks  # noqa: PLC0415
    import gpu_engine  # noqa: PLC0415
    import gpu_pages  # noqa: PLC0415
    import gpu_rows_bench  # noqa: PLC0415

    return [
        ("ceilings", "bench", gpu_rows_bench.ceilings),
        ("checks against float64", "check", gpu_checks.run),
        ("prefill attention", "bench", gpu_attention.prefill),
        ("decode attention", "bench", gpu_attention.decode),
        ("pages, rows and sampling", "bench", gpu_rows_bench.run),
        ("tuning", "tune", gpu_attention.tune),
        ("engine against the CPU's", "check", gpu_engine.check),
        ("pages through the host's memory", "check", gpu_pages.run),
        ("engine, nano-vllm's workload", "bench", gpu_engine.bench),
    ]


def _find_package() -> None:
    """Make `pdserve` and the tests' shared modules importable from this file's tree, and restore its missing links."""
    root = Path(__file__).resolve().parents[2]
    for name in ("kernels", "kvtransfer"):
        link = root / "pdserve" / name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{name}")
    sys.path[:0] = [str(root), str(root / "tests" / "support")]


if __name__ == "__main__":
    sys.exit(main())
