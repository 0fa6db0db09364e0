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
    question = Question(profile, random_lengths(500, 800, 60, 1), Objective(3.0, 0.04))
    present, predicted = rejection.compare(question, Shape(6, 1, local_prefill=False), 20.0)
    assert present.swing > 2 * predicted.swing
    assert predicted.attainment > 1.5 * present.attainment
    assert predicted.refused < present.refused
    assert sum(present.refusals) == pytest.approx(present.refused * 500)
    assert rejection.table((present, predicted), "title").row_count == 2
    pytest.importorskip("matplotlib")
    rejection.plot((present, predicted), "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
