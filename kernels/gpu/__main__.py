"""Check every kernel on this machine's GPU, then time it beside what torch offers.

    python3 kernels/gpu/__main__.py [check] [bench] [tune] [--only TEXT]

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

# Name, the word that asks for it, and where its function is: kernels may not import what is built upon them.
SECTIONS = [
    ("ceilings", "bench", "kernels.gpu.rows_bench:ceilings"),
    ("checks against float64", "check", "kernels.gpu.checks:run"),
    ("prefill attention", "bench", "kernels.gpu.attention_bench:prefill"),
    ("decode attention", "bench", "kernels.gpu.attention_bench:decode"),
    ("pages, rows and sampling", "bench", "kernels.gpu.rows_bench:run"),
    ("tuning", "tune", "kernels.gpu.tune:run"),
    ("engine against the CPU's", "check", "engine.gpu:check"),
    ("pages through the host's memory", "check", "kvtransfer.gpu_check:run"),
    ("engine, nano-vllm's workload", "bench", "engine.gpu:bench"),
]


def main() -> int:
    """Run the sections asked for (check and bench by default); returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="check, bench, tune; by default check and bench")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    _find_package()
    from pdserve.kernels.gpu import rows, timing  # noqa: PLC0415 - the package is only now importable

    if not timing.has_gpu():
        sys.stderr.write("no CUDA device: nothing to do\n")
        return 2
    asked = arguments.sections or ["check", "bench"]
    results: dict[str, object] = {"machine": timing.machine(), "clocks_before": timing.clocks()}
    sys.stdout.write(json.dumps(results) + "\n")
    failed = False
    for name, group, place in SECTIONS:
        if group not in asked:
            continue
        module, _, function = place.partition(":")
        run = getattr(importlib.import_module(f"pdserve.{module}"), function)
        found = run(arguments.only)
        sys.stdout.write(rows.table(name, found))
        sys.stdout.flush()
        results[name] = [asdict(row) for row in found]
        failed = failed or any(row.failed for row in found)
    results["clocks_after"] = timing.clocks()
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "kernels.json").write_text(json.dumps(results, indent=1))
    sys.stdout.write("FAILED\n" if failed else "all well\n")
    return int(failed)


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
