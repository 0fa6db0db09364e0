"""Which steps ran as a decode program."""

import pytest
from torch import Tensor

from pdserve.engine.batch import Ints
from pdserve.engine.features import Features
from pdserve.engine.runner import DecodePrograms
from pdserve.model.taps import Tap


def note_program_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return where each step that runs as a program, on any rank, notes its rows."""
    rows, logits = list[int](), DecodePrograms.logits

    def noted(programs: DecodePrograms, token_ids: Ints, features: Features) -> tuple[Tensor, Tap]:
        rows.append(len(token_ids))
        return logits(programs, token_ids, features)

    monkeypatch.setattr(DecodePrograms, "logits", noted)
    return rows
