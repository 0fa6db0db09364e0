"""Steps that decode, as one call of a recorded program on a CPU."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.attention_compiled import CompiledAttention
from pdserve.engine.batch import Ints
from pdserve.engine.features import Features
from pdserve.engine.layer_kinds import ByLayer
from pdserve.engine.states_compiled import CompiledStates
from pdserve.kernels.cpu.calls import Program
from pdserve.model.family import Model
from pdserve.model.taps import Tap


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    keeping: Program  # writes the states that a step leaves
    token_ids: Tensor  # int64 [rows]
    logits: Tensor  # [rows, vocab_size]
    tap: Tap
    attention: object  # has memory that the programs use


class DecodePrograms:
    """Computes steps of single tokens, each of which is sampled from, as one call of a program.

    The model's own forward pass records the program, over operations that only keep their calls.
    """

    def __init__(self, model: Model, attention: ByLayer[CompiledAttention], loaded: ctypes.CDLL) -> None:
        self._model = model
        self._attention = attention
        self._loaded = loaded
        self._recorded: _Recorded | None = None

    @property
    def lack_growth(self) -> bool:
        """Say whether queries of the planned step grow with their position, which programs do not compute."""
        return any(part.grows for part in self._attention.parts)

    def logits(self, token_ids: Ints, features: Features) -> tuple[Tensor, Tap]:
        """Compute a step that attention has planned; return its logits and what was collected, until the next step.

        features: the same for all steps.
        """
        num_rows = len(token_ids)
        if self._recorded is None or len(self._recorded.token_ids) < num_rows:
            self._recorded = self._record(1 << (num_rows - 1).bit_length(), features)
        recorded = self._recorded
        recorded.token_ids.numpy()[:num_rows] = token_ids
        recorded.program.run(num_rows)
        if isinstance(self._attention.states, CompiledStates):
            self._attention.states.computed(recorded.keeping, num_rows)
        return recorded.logits[:num_rows], recorded.tap

    def _record(self, num_rows: int, features: Features) -> _Recorded:
        program, keeping, tap = Program(self._loaded), Program(self._loaded), features.tap()
        model = self._model.through(program)
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        attention, states = self._attention, self._attention.states
        parts = tuple([part.planned(program) for part in attention.parts])
        if isinstance(states, CompiledStates):
            states = states.planned(program, keeping)
        planned = ByLayer(parts, attention.groups, attention.places, states)
        logits = model.forward(token_ids, planned, None, tap)
        if states is not None:
            states.commit()
        return _Recorded(program, keeping, token_ids, logits, tap, planned)
