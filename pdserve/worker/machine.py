"""What a worker computes on, and in which type where it is left to choose."""

import platform
from pathlib import Path
from typing import Literal

import torch

from pdserve.config import Device, Dtype

ChosenDtype = Literal["bfloat16", "float16", "float32"]

CPU_INFO = Path("/proc/cpuinfo")
BF16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")  # as x86 calls them in "flags", ARM in "Features"
MAX_CHARACTERS = 100
_FEATURE_LINES = ("flags", "Features")


def choose_dtype(asked: Dtype, device: Device, cpu_info: str) -> tuple[ChosenDtype, str]:
    """Return the type of weights and KV, and why. cpu_info: what CPU_INFO says, empty where it is not there.

    On a processor that does not multiply bfloat16 itself, a product of a few rows takes up to 3 times as long as in
    float32, which needs twice the memory.
    """
    if asked != "auto":
        return asked, "it was asked for"
    if device in ("cuda", "interpreter"):
        return "bfloat16", "GPUs multiply it"
    features = _features(cpu_info)
    for feature in BF16_PRODUCTS:
        if feature in features:
            return "bfloat16", f"this processor has {feature}"
    wanted = ", ".join(BF16_PRODUCTS)
    if not features:
        return "float32", f"{CPU_INFO} does not say what this processor has (none of {wanted})"
    return "float32", f"this processor has none of {wanted}"


def read_cpu_info() -> str:
    """Return what CPU_INFO says, empty where there is none."""
    try:
        return CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _features(cpu_info: str) -> frozenset[str]:
    """Return what all processors have."""
    fields = (line.partition(":") for line in cpu_info.splitlines())
    of_each = [frozenset(values.split()) for key, _, values in fields if key.strip() in _FEATURE_LINES]
    return frozenset.intersection(*of_each) if of_each else frozenset()


def device_name(device: str, cpu_info: Path = CPU_INFO) -> str:
    """Return the name by which routers learn what steps cost: the model of the GPU or the CPU.

    Triton's interpreter has another one, since it is far slower.
    """
    if device == "cuda":
        return torch.cuda.get_device_name(torch.cuda.current_device())[:MAX_CHARACTERS]
    name = _cpu_name(cpu_info)[:MAX_CHARACTERS]
    return f"interpreter, {name}" if device == "interpreter" else name


def _cpu_name(cpu_info: Path) -> str:
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.machine() or "CPU")
