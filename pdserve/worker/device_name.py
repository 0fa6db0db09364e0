"""What a worker computes on, by the name under which a router learns what steps cost."""

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")
MAX_CHARACTERS = 100


def device_name(device: str, cpu_info: Path = _CPU_INFO) -> str:
    """Return the model name of the GPU or the CPU; another one for Triton's interpreter, which is far slower."""
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
