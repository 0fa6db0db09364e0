"""Calls of the compiled library over a step's rows: each computed at once, or all recorded as one program.

A program is a run of calls whose weights and buffers stay at their addresses. Python takes no part in it, and its
threads never wait for a thread that the kernel does not run (src/team.c).
"""

import ctypes
import weakref
from collections import defaultdict
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.cpu.library import Pointer, Size, function


class Kind(IntEnum):
    """As src/calls.h numbers them."""

    NORM = 0
    LOOKUP_BFLOAT16 = 1
    LOOKUP_QUANTIZED = 2
    PRODUCT_BFLOAT16 = 3
    CODING = 4
    PRODUCT_QUANTIZED = 5
    PLACING = 6
    RANGES = 7
    COMBINING = 8
    BLOCKS = 9
    LAYER_NORM = 10
    LOGITS = 11
    ROUTING = 12
    GROUPING = 13
    GATHERING = 14
    EXPERTS = 15
    EXPERTS_CODING = 16
    SUMMING = 17
    RANKS_SUM = 18
    RANKS_GATHER = 19
    PRODUCT_HEADS = 20
    RANKS_PASS = 21
    CONVOLVING = 22
    RECURRING = 23
    KEEPING = 24
    GATING = 25
    SCALING = 26
    MULTIPLYING = 27


class Mixture(ctypes.Structure):
    """`struct mixture` of src/calls.h."""

    _fields_ = (
        ("chosen", Pointer),
        *((name, Size) for name in ("num_experts", "num_chosen", "by_sigmoid", "normalized")),
        *((name, Size) for name in ("num_groups", "num_kept_groups", "group_best", "expert_bytes")),
        *((name, Pointer) for name in ("shared", "shared_gates", "counts")),
        ("added", ctypes.c_double),
    )


class Call(ctypes.Structure):
    """`struct call` of src/calls.h."""

    _fields_ = (
        *((name, Size) for name in ("kind", "type", "out_type")),
        *((name, Pointer) for name in ("out", "x")),
        *((name, Size) for name in ("out_stride", "x_stride", "inputs", "width")),
        *((name, Pointer) for name in ("weights", "bias", "residual")),
        *((name, Size) for name in ("residual_stride", "after", "activation")),
        *((name, Size) for name in ("num_heads", "x_head", "bits", "is_float", "input_bits")),
        *((name, Pointer) for name in ("scratch", "step")),
        *((name, Size) for name in ("layer", "rope", "new_heads")),
        *((name, Pointer) for name in ("q_norm", "k_norm", "v_norm", "sinks")),
        ("norms_after", Size),
        *((name, ctypes.c_double) for name in ("eps", "scale", "cap", "positive", "negative")),
        ("mixture", Mixture),
        ("first", Size),
        *((name, Pointer) for name in ("ranks", "states", "recurrence")),
        *((name, ctypes.c_uint64) for name in ("taken", "done")),
    )


_ALL_PACKED: list[ctypes.Array[Call]] = []  # kept for ever: a late thread looks at them even when their program is gone


class Calls(Protocol):
    """Takes calls in the order in which to compute them."""

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a call's result, or for its scratch."""
        ...

    def take(self, num_rows: int, *calls: Call) -> None:
        """Compute the calls of one operation over rows, now or later. Weights, results and steps must stay in place."""
        ...


MOST_AT_ONCE = 8  # calls of one operation
WORTH_TEAM = 64  # rows; threads of a program sleep between its runs, and waking them takes longer than fewer rows


class Immediate:
    """Computes each call at once: over few rows in OpenMP's threads, over many in those of programs."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._run = function(loaded, "pdserve_run", Pointer, Size, Size)
        self._run_in_team = function(loaded, "pdserve_run_program", Pointer, Size, Size, Size)
        self._kept = (Call * (MOST_AT_ONCE + 1))()  # the last is of no run
        _ALL_PACKED.append(self._kept)

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, width), dtype=dtype)

    def take(self, num_rows: int, *calls: Call) -> None:
        if num_rows < WORTH_TEAM:
            self._run((Call * len(calls))(*calls), len(calls), num_rows)
            return
        for place, call in enumerate(calls):
            self._kept[place] = call
        self._run_in_team(self._kept, len(calls), num_rows, torch.get_num_threads())


class Program:
    """Records calls, then computes all of them over any number of rows up to the recorded one.

    Buffers are reused: once nobody holds the tensor that `empty` returned, a later call may get the same memory.
    """

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._run = function(loaded, "pdserve_run_program", Pointer, Size, Size, Size)
        self._calls: list[Call] = []
        self._packed: ctypes.Array[Call] | None = None
        self._buffers: list[Tensor] = []
        self._free: defaultdict[tuple[int, int, torch.dtype], list[Tensor]] = defaultdict(list)

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        free = self._free[num_rows, width, dtype]
        if not free:
            free.append(torch.empty((num_rows, width), dtype=dtype))
            self._buffers.append(free[-1])
        buffer = free.pop()
        lent = buffer.view(num_rows, width)
        weakref.finalize(lent, free.append, buffer).atexit = False
        return lent

    def take(self, num_rows: int, *calls: Call) -> None:
        del num_rows
        self._calls += calls

    def run(self, num_rows: int) -> None:
        """Compute all calls over `num_rows`, in as many threads as torch has. After the first run it takes no calls."""
        if self._packed is None:
            self._packed = (Call * (len(self._calls) + 1))(*self._calls)  # the last is of no run
            _ALL_PACKED.append(self._packed)
        self._run(self._packed, len(self._calls), num_rows, torch.get_num_threads())
