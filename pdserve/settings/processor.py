"""Features of the processor, the dtype that suits it, and settings of torch that do not suit a worker."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pdserve.settings.config import Device, Dtype

ChosenDtype = Literal["bfloat16", "float16", "float32"]

CPU_INFO = Path("/proc/cpuinfo")
BF16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")  # as x86 calls them in "flags", ARM in "Features"
_FEATURE_LINES = ("flags", "Features")

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_problem(environment: Mapping[str, str] = os.environ) -> str:
    """Return what keeps torch's GPU memory from being registered for transfers to other processes; empty: nothing."""
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            return f"{name}: expandable_segments makes memory that no other process can be given: leave it out"
    return ""


def choose_dtype(asked: Dtype, device: Device, cpu_info: str, *, compiled: bool) -> tuple[ChosenDtype, str]:
    """Return the type of weights and KV, and why.

    `cpu_info`: the content of CPU_INFO, empty without that file. `compiled`: whether there are kernels compiled for
    this processor. On AVX2 these kernels multiply bfloat16 as fast as float32, while torch takes up to 8 times as long.
    Processors with AVX-512 but without products of bfloat16 were not measured.
    """
    if asked != "auto":
        return asked, "it was asked for"
    if device in ("cuda", "interpreter"):
        return "bfloat16", "GPUs multiply it"
    features = cpu_features(cpu_info)
    wanted = (*BF16_PRODUCTS, "avx2") if compiled and "avx512f" not in features else BF16_PRODUCTS
    for feature in wanted:
        if feature in features:
            return "bfloat16", f"this processor has {feature}"
    if not features:
        return "float32", f"{CPU_INFO} does not say what this processor has (none of {', '.join(wanted)})"
    return "float32", f"this processor has none of {', '.join(wanted)}"


def read_cpu_info() -> str:
    """Return the content of CPU_INFO, empty without that file."""
    try:
        return CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_features(cpu_info: str) -> frozenset[str]:
    """Return the features that all processors of the machine have. `cpu_info`: the content of CPU_INFO."""
    fields = (line.partition(":") for line in cpu_info.splitlines())
    of_each = [frozenset(values.split()) for key, _, values in fields if key.strip() in _FEATURE_LINES]
    return frozenset.intersection(*of_each) if of_each else frozenset()


def cpu_name(cpu_info: str) -> str:
    names = (line.partition(":")[2].strip() for line in cpu_info.splitlines() if line.startswith("model name"))
    return next(filter(None, names), platform.machine() or "CPU")
