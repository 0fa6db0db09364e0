"""Check kernels and engine on this machine's GPU, and time them: sections, most telling first.

    python3 tests/gpu/run_gpu.py [--only NAME[,NAME]] [--seconds N] [--all] [--dry]

Needs torch, triton, numpy and safetensors. Prints a line a section at once, and what failed; every figure goes to
$OUT/gpu.json where OUT is set, else to the screen. It also works in a copy of the tree that lost its links.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_process import Options, Record
    from gpu_report import Section

NEEDED = ("numpy", "safetensors", "torch", "triton")
SECONDS = 540.0  # a borrowed GPU may be lent for ten minutes a command
DRY_SECONDS = 3600.0


def main() -> int:
    """Run the sections asked for, by default all but `tune`; returns 1 if a case failed, or none was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of sections, with commas between them")
    parser.add_argument("--seconds", type=float, help=f"for all sections together; by default {SECONDS:.0f}")
    parser.add_argument("--all", action="store_true", help="every kernel check, and not the telling ones alone")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, through Triton's interpreter")
    arguments = parser.parse_args()
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    if lacks := [name for name in NEEDED if find_spec(name) is None]:
        program = Path(sys.executable).name
        sys.stderr.write(f"{program} lacks {', '.join(lacks)}: install them, or take a Python that has them\n")
        return 2
    find_package()
    from gpu_process import Options  # noqa: PLC0415 - the package is only now importable
    from gpu_sections import DEFAULT, SECTIONS  # noqa: PLC0415

    names = arguments.only.split(",") if arguments.only else list(DEFAULT)
    unknown = sorted(set(names).difference(SECTIONS))
    if unknown:
        parser.error(f"no section is called {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    if not arguments.dry and not has_gpu():
        sys.stderr.write("no CUDA device: nothing to do\n")
        return 2
    seconds = arguments.seconds or (DRY_SECONDS if arguments.dry else SECONDS)
    options = Options(is_dry=arguments.dry, is_thorough=arguments.all)
    is_well = run_sections([SECTIONS[name] for name in SECTIONS if name in names], options, seconds)
    sys.stdout.write("all well\n" if is_well else "FAILED\n")
    return int(not is_well)


def has_gpu() -> bool:
    import torch  # noqa: PLC0415 - only now importable, perhaps

    return torch.cuda.is_available()


def run_sections(sections: "Sequence[Section]", options: "Options", seconds: float) -> bool:
    """Run sections within some seconds; return whether there is any row, and none failed."""
    from gpu_process import Computing, Record, deal  # noqa: PLC0415

    computing, started_s = Computing(options), time.perf_counter()
    records = {section.name: Record() for section in sections}
    about: dict[str, object] = {"is_dry": options.is_dry, "seconds": seconds, "machine": computing.facts}
    _save(records, about)
    try:
        for section, share_s, limit_s in deal(list(sections), seconds):
            if share_s > 0:
                records[section.name] = computing.run(section, share_s, limit_s)
            _say(section.name, records[section.name])
            _save(records, about | {"machine": computing.facts})
    finally:
        computing.close()
    sys.stdout.write(f"{time.perf_counter() - started_s:.0f} s of {seconds:.0f}\n")
    rows = [row for record in records.values() for row in record.rows]
    return bool(rows) and not any(row.failed for row in rows)


def _say(name: str, record: "Record") -> None:
    from gpu_report import line  # noqa: PLC0415

    failed = [row for row in record.rows if row.failed]
    counts = f"{len(record.rows)} rows, {len(failed)} failed, {record.took_s:.1f} s of {record.budget_s:.0f}"
    shown = failed if "OUT" in os.environ else record.rows
    lines = [f"== {name}: {record.state}, {counts}", *(line(row) for row in shown)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _save(records: "dict[str, Record]", about: dict[str, object]) -> None:
    """Write what is known to $OUT/gpu.json. Whoever reads that file finds all of it, old or new."""
    if "OUT" not in os.environ:
        return
    found = {**about, "sections": {name: asdict(record) for name, record in records.items()}}
    path = Path(os.environ["OUT"], "gpu.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1, default=str))
    partial.replace(path)


def find_package() -> None:
    """Make `pdserve` and the tests' shared modules importable from this file's tree, and restore its missing links."""
    root = Path(__file__).resolve().parents[2]
    for name in ("kernels", "kvtransfer"):
        link = root / "pdserve" / name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{name}")
    sys.path[:0] = [str(root), str(root / "tests" / "support"), str(Path(__file__).resolve().parent)]


if __name__ == "__main__":
    sys.exit(main())
