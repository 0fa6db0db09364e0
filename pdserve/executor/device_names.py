"""What the devices of this machine are called."""

import torch

from pdserve.settings.processor import cpu_name, read_cpu_info

MAX_CHARACTERS = 100


def device_name(device: str, cpu_info: str) -> str:
    """Return the name by which routers learn what steps cost: the model of the GPU or the CPU.

    Triton's interpreter has another one, since it is far slower.
    """
    if device == "cuda":
        return torch.cuda.get_device_name(torch.cuda.current_device())[:MAX_CHARACTERS]
    name = cpu_name(cpu_info)[:MAX_CHARACTERS]
    return f"interpreter, {name}" if device == "interpreter" else name


def devices_here() -> tuple[str, ...]:
    """Return the names of what ranks may compute with on this machine: its processor, and its first GPU if any."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple(device_name(kind, read_cpu_info()) for kind in kinds)
