"""Report what the compiler makes of every kernel for chips that need not be here.

    python tests/support/kernel_report.py [--capability 90 ...] [--write docs/measurements/kernels-compile-report.md]

Registers, spills and shared memory are facts about the machine code; no kernel is run.
"""

import argparse
import os
import sys
from pathlib import Path

import kernel_catalog as catalog
import kernel_compiler as compiling
import torch
import triton

HEADER = """| case | kernel | registers | spilled bytes | shared KiB | warps | at a time | matrix unit |
| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"""
LEGEND = (
    "**Bold**: a step's time goes here, and nothing may spill. *At a time*: how many programs registers and shared "
    "memory let run on one multiprocessor."
)


def main() -> int:
    """Print the report; returns 1 if a kernel does not fit its chip, or a hot one spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=list(catalog.CHIPS), choices=list(catalog.CHIPS))
    parser.add_argument("--only", default="", help="compile the cases whose name contains this")
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    text, fits = report(arguments.capability, arguments.only)
    sys.stdout.write(text)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text)
    return 0 if fits else 1


def report(capabilities: list[int], only: str) -> tuple[str, bool]:
    """Compile, and return the report with whether every kernel fits its chip and no hot one spills."""
    lines = [
        "# Kernels: compile report",
        "",
        f"Written by `python tests/support/kernel_report.py` with torch {torch.__version__}, "
        f"Triton {triton.__version__}. Nothing here was run on a GPU.",
        "",
        LEGEND,
    ]
    fits = True
    for capability in capabilities:
        chip, shared_bytes = catalog.CHIPS[capability], catalog.SHARED_BYTES[capability]
        lines += ["", f"## sm_{capability}", "", HEADER]
        for case in catalog.cases():
            if only not in case.name:
                continue
            for made in compiling.compile_all(lambda case=case, chip=chip: case.run(chip), capability):  # type: ignore[misc]
                lines.append(_row(case, made, made.programs_at_a_time(shared_bytes)))
                fits = fits and made.shared_bytes <= shared_bytes and not (case.hot and made.spill_bytes)
    return "\n".join(lines) + "\n", fits


def _row(case: catalog.Case, made: compiling.Resources, at_a_time: int) -> str:
    name = f"**{case.name}**" if case.hot else case.name
    unit = made.matrix_unit + (" (serialized)" if made.serialized else "")
    shared = f"{made.shared_bytes / 1024:.1f}"
    figures = (made.registers, made.spill_bytes, shared, made.num_warps, at_a_time)
    return f"| {name} | {made.kernel} | {' | '.join(map(str, figures))} | {unit} |"


if __name__ == "__main__":
    sys.exit(main())
