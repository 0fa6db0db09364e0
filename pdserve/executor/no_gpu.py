"""Why torch sees no GPU, in one line with what helps."""

import ctypes

import torch

Version = tuple[int, int]


def driver_version() -> Version | None:
    """Return the newest CUDA that this machine's driver knows; None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int()
    return divmod(found.value // 10, 100) if driver.cuDriverGetVersion(ctypes.byref(found)) == 0 else None


def why_no_gpu(built_for: str | None, driver: Version | None, visible: str | None) -> str:
    """Return the reason.

    built_for: torch's CUDA, None without. driver: what `driver_version` says. visible: CUDA_VISIBLE_DEVICES, if set.
    """
    if built_for is None:
        return f"torch {torch.__version__} is built without CUDA: install one that is built for it"
    if driver is None:
        return "there is no NVIDIA driver (libcuda.so.1): install one, or let the container have the host's"
    major, minor = driver
    if major < int(built_for.partition(".")[0]):
        cure = f"update the driver, or install a torch that is built for CUDA {major}"
        return f"the driver knows CUDA {major}.{minor}, torch is built for {built_for}: {cure}"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} leaves none: name those that nvidia-smi shows"
    return "nvidia-smi says whether the driver sees one"
