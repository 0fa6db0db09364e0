"""Sections that need processes of their own: starts, and steps under NVIDIA's compute-sanitizer."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from gpu_device import Device
from gpu_report import Case, Row

PROGRAM = Path(__file__).with_name("gpu_alone.py")
TOOLS = ("memcheck", "racecheck")
SEARCHED = ("", "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
START_S, TOOL_S = 300.0, 120.0
SUMMARY = "ERROR SUMMARY:"
SHOWN_LINES = 3


def starts(device: Device) -> Iterator[Case]:
    """Start with nothing compiled, then again with what that start has compiled."""
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            yield name, partial(_start, device, name, cache)


def _start(device: Device, name: str, cache: str) -> list[Row]:
    done = _run(device, [], "start", START_S, TRITON_CACHE_DIR=cache)
    if done.returncode:
        return [Row(f"{name} start", note=done.stderr[-400:], failed=True)]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return [Row(f"{name} start", {**found, "s in all": sum(found.values())})]


def sanitizer(device: Device) -> Iterator[Case]:
    """Check a decode step and a mixed one for stray accesses and races, where the tool is."""
    tool = _sanitizer(device)
    if tool is None:
        yield "compute-sanitizer", lambda: [Row("compute-sanitizer", note="skipped: it is not installed")]
        return
    for check in TOOLS:
        yield check, partial(_checked, device, tool, check)


def _sanitizer(device: Device) -> str | None:
    """Return the tool; in a dry run a program that only runs what it is given."""
    if device.is_dry:
        return shutil.which("env")
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *SEARCHED]))


def _checked(device: Device, tool: str, check: str) -> list[Row]:
    # Calls of CUDA that fail are torch's to notice: it tries some to see what there is.
    flags = ["--tool", check, "--error-exitcode", "9", "--report-api-errors", "no"]
    # Without the cache of torch's allocator each tensor is memory of its own, past which nothing may be read.
    before = [tool, *device.sized(flags, [f"CHECK={check}"])]
    done = _run(device, before, "steps", TOOL_S, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    output = done.stdout + done.stderr
    if "OUT" in os.environ:
        Path(os.environ["OUT"], f"{check}.txt").write_text(output)
    errors = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    shown = (
        [*(line for line in errors if SUMMARY in line), *errors[1 : 1 + SHOWN_LINES]]
        if done.returncode
        else errors[-1:]
    )
    return [Row(f"{check} of two steps", note="; ".join(shown) or output[-200:], failed=bool(done.returncode))]


def _run(
    device: Device, before: list[str], what: str, timeout_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, str(PROGRAM), what, *device.sized([], ["--dry"])]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
