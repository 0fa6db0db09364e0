"""Which steps ran as a decode program, and whether those in bfloat16 have to on this machine."""

import pytest
from torch import Tensor

from pdserve.engine.batch import Ints
from pdserve.engine.decode_programs import DecodePrograms
from pdserve.engine.features import Features
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.layers import multiplies_bfloat16
from pdserve.kernels.cpu.library import library
from pdserve.model.taps import Tap


def note_program_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return where each step that runs as a program, on any rank, notes its rows."""
    rows, logits = list[int](), DecodePrograms.logits

    def noted(programs: DecodePrograms, token_ids: Ints, features: Features) -> tuple[Tensor, Tap]:
        rows.append(len(token_ids))
        return logits(programs, token_ids, features)

    monkeypatch.setattr(DecodePrograms, "logits", noted)
    return rows


def has_bfloat16_products() -> bool:
    loaded = library()
    return not isinstance(loaded, Missing) and multiplies_bfloat16(loaded)
