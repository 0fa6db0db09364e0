"""Decode steps as programs: where everything that a step of single tokens computes is compiled, it is one call.

A program is recorded by the model's own forward pass, over operations that keep what they are asked to compute.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.attention_compiled import CompiledAttention
from pdserve.engine.batch import Ints
from pdserve.kernels.cpu.calls import Program
from pdserve.kernels.cpu.products import Tiles
from pdserve.kernels.cpu.quantized import QuantizedTiles
from pdserve.model.family import Model
from pdserve.model.ops_cpu import CompiledOps


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    token_ids: Tensor  # int64 [rows]
    logits: Tensor  # [rows, vocab_size]


class DecodePrograms:
    """Computes steps of single tokens that are all sampled from."""

    def __init__(self, model: Model, attention: CompiledAttention, loaded: ctypes.CDLL) -> None:
        self._model = model
        self._attention = attention
        self._loaded = loaded
        self._recorded: _Recorded | None = None

    def logits(self, token_ids: Ints) -> Tensor:
        """Compute a step that attention has planned; returns its logits, to be used before the next step."""
        num_rows = len(token_ids)
        if self._recorded is None or len(self._recorded.token_ids) < num_rows:
            self._recorded = self._record(1 << (num_rows - 1).bit_length())
        recorded = self._recorded
        recorded.token_ids.numpy()[:num_rows] = token_ids
        recorded.program.run(num_rows)
        return recorded.logits[:num_rows]

    def _record(self, num_rows: int) -> _Recorded:
        program = Program(self._loaded)
        model = self._model.with_ops(CompiledOps(self._model.config.rms_norm_eps, program))
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        logits = model.forward(token_ids, self._attention.planned(program), None)
        return _Recorded(program, token_ids, logits)


def is_compiled(model: Model) -> bool:
    """Say whether all products of a model are the library's."""
    return all(isinstance(matrix, Tiles | QuantizedTiles) for matrix in model.matrices())
