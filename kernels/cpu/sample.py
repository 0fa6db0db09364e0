"""Sampling on CPUs, compiled: the tokens that `tests/support/reference_kernels.py` defines, of adjusted logits."""

import ctypes
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.library import DTYPES, Pointer, Size, function
from pdserve.kernels.rng import Words
from pdserve.protocol.sampling import SamplingParams

LANES = 16

# `struct row` of src/sample.c.
_ROW = np.dtype(
    [
        ("logits", np.uintp), ("type", np.int64), ("top_k", np.int64), ("top_p", np.float64),
        ("log_min_p", np.float64), ("low", np.uint32), ("high", np.uint32), ("temperature", np.float32),
    ],
    align=True,
)  # fmt: skip


class RowSampler:
    """The library's sampler. It reuses its memory, so it is for one thread at a time."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._sample = function(loaded, "pdserve_sample", Pointer, Pointer, Size, Size, Pointer, Size)
        self._space = np.empty(0, dtype=np.float32)

    def sample(
        self, logits: Tensor, changed: Mapping[int, Tensor], params: Sequence[SamplingParams], keys: Words
    ) -> list[int]:
        """Sample a token id of each row, by its temperature, top-k, top-p and min-p.

        logits: [num_rows, vocab_size], float32 or bfloat16. changed: float32 [vocab_size], in place of some rows: those
        with penalties, biases or masks. keys: `rng.keys` of the rows.
        """
        require_tensor("logits", logits, (len(params), None), tuple(DTYPES))
        num_rows, vocab_size = logits.shape
        require(len(keys) == num_rows > 0, f"keys must be of {num_rows} rows, at least one, got {len(keys)}")
        described = np.empty(num_rows, dtype=_ROW)
        described["logits"] = logits.data_ptr() + np.arange(num_rows) * (logits.stride(0) * logits.itemsize)
        described["type"] = DTYPES[logits.dtype]
        for row, values in changed.items():
            require_tensor("changed", values, (vocab_size,), (torch.float32,))
            described[row]["logits"], described[row]["type"] = values.data_ptr(), DTYPES[torch.float32]
        described["low"], described["high"] = keys[:, 0], keys[:, 1]
        described["temperature"] = [0.0 if each.is_greedy else each.temperature for each in params]
        described["top_k"], described["top_p"] = [each.top_k for each in params], [each.top_p for each in params]
        described["log_min_p"] = [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
        num_threads, token_ids = torch.get_num_threads(), np.empty(num_rows, dtype=np.int64)
        size = num_threads * (2 * vocab_size + LANES)
        if len(self._space) < size:
            self._space = np.empty(size, dtype=np.float32)
        self._sample(
            token_ids.ctypes.data, described.ctypes.data, num_rows, vocab_size, self._space.ctypes.data, num_threads
        )
        found: list[int] = token_ids.tolist()
        return found
