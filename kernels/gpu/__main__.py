"""Check every kernel on this machine's GPU, then time it beside what torch offers.

    python3 kernels/gpu/__main__.py [check] [bench] [tune] [--only TEXT] [--flex]

Needs torch, triton, numpy and safetensors. Prints short tables; all figures go to $OUT/kernels.json where OUT is set.
Started as a file, it also works in a copy of the tree that lost its links.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.kernels.gpu import sections

SECTIONS_ABOVE = [
    ("engine against the CPU's", "check", "pdserve.engine.gpu_check"),
    ("pages through the host's memory", "check", "pdserve.kvtransfer.gpu_check"),
    ("engine, nano-vllm's workload", "bench", "pdserve.engine.gpu_bench"),
]


def main() -> int:
    """Run the sections asked for (check and bench by default); returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="check, bench, tune; by default check and bench")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--flex", action="store_true", help="time FlexAttention on every shape, not on two")
    arguments = parser.parse_args()
    _find_package()
    from pdserve.kernels.gpu import sections, timing  # noqa: PLC0415 - the package is only now importable

    if not timing.has_gpu():
        sys.stderr.write("no CUDA device: nothing to do\n")
        return 2
    asked = arguments.sections or ["check", "bench"]
    results: dict[str, object] = {"machine": timing.machine(), "clocks_before": timing.clocks()}
    sys.stdout.write(json.dumps(results) + "\n")
    failed = False
    for section in (*sections.SECTIONS, *_sections_above()):
        if section.group not in asked:
            continue
        rows = section.run(sections.Choice(arguments.only, arguments.flex))
        sys.stdout.write(sections.table(section.name, rows))
        sys.stdout.flush()
        results[section.name] = [asdict(row) for row in rows]
        failed = failed or any(row.failed for row in rows)
    results["clocks_after"] = timing.clocks()
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "kernels.json").write_text(json.dumps(results, indent=1))
    sys.stdout.write("FAILED\n" if failed else "all well\n")
    return int(failed)


def _sections_above() -> "list[sections.Section]":
    """Load the sections of what is built upon the kernels, which kernels may not import."""
    from pdserve.kernels.gpu import sections  # noqa: PLC0415 - the package is only now importable

    return [
        sections.Section(name, group, importlib.import_module(module).run) for name, group, module in SECTIONS_ABOVE
    ]


def _find_package() -> None:
    """Make `pdserve` importable from the tree this file is in, and put back those of its links that are gone."""
    root = Path(__file__).resolve().parents[2]
    for name in ("kernels", "kvtransfer"):
        link = root / "pdserve" / name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{name}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


if __name__ == "__main__":
    sys.exit(main())
