"""Admission by the present decode load sways; by the predicted one it does not."""

from pathlib import Path

import pytest

from pdserve.perfmodel.profile import read_profile, shipped_profile
from pdserve.sim.capacity import rejection
from pdserve.sim.capacity.measure import Question
from pdserve.sim.capacity.shape import Objective, Shape
from pdserve.sim.capacity.workload import random_lengths


def test_judging_by_the_predicted_load_stops_the_swing_and_serves_more(tmp_path: Path) -> None:
    profile = read_profile(shipped_profile())
    question = Question(profile, random_lengths(900, 1500, 60, 1), Objective(10.0, 0.06))
    present, predicted = rejection.compare(question, Shape(2, 1, local_prefill=False), 24.0)
    assert present.swing > 1.5 * predicted.swing
    assert present.slow > 4 * predicted.slow
    assert predicted.attainment > 1.1 * present.attainment
    assert sum(present.refusals) == pytest.approx(present.refused * 900)
    assert rejection.table((present, predicted), "title").row_count == 2
    pytest.importorskip("matplotlib")
    rejection.plot((present, predicted), "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
