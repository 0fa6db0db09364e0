"""Loads the compiled library into this process, or logs once why there is none.

The library needs the OpenMP runtime that torch has loaded. It computes with as many threads as torch: in OpenMP's team,
which torch's own operations use, or in its own team (src/team.c).
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import torch  # its OpenMP runtime has to be there first

from pdserve.kernels.cpu.build import Missing, Reason, built

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # as src/vectors.h numbers them

Function = Callable[..., None]
Pointer = ctypes.c_void_p
Size = ctypes.c_int64


@cache
def library() -> ctypes.CDLL | Missing:
    """Return the library, compiled if need be; a warning names the reason if there is none."""
    path = built()
    if isinstance(path, Missing):
        return _without(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return _without(Missing(Reason.LOADING, str(error)))


def function(loaded: ctypes.CDLL, name: str, *arguments: type) -> Function:
    """Return a function of the library that returns nothing."""
    found = loaded[name]
    found.argtypes, found.restype = arguments, None
    return found


def answer(loaded: ctypes.CDLL, name: str) -> bool:
    """Ask the library what it was compiled for."""
    found = loaded[name]
    found.restype = Size
    return bool(found())


def _without(missing: Missing) -> Missing:
    logger.warning("no compiled kernels, plain torch computes instead, which is slower: %s", missing)
    return missing
