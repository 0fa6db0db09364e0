"""Admission by the present decode load sways; by the predicted one it does not."""

from math import pi, sin
from pathlib import Path
from statistics import fmean

import pytest

from pdserve.capacity import rejection
from pdserve.capacity.measure import Question
from pdserve.capacity.rejection import Sway
from pdserve.capacity.shape import Objective, Shape
from pdserve.capacity.workload import random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
NUM_REQUESTS = 900


def compare(seed: int, *, corrects: bool) -> tuple[Sway, Sway]:
    question = Question(PROFILE, random_lengths(NUM_REQUESTS, 4000, 45, seed, 0.4), Objective(2.0, 0.05))
    return rejection.compare(question, Shape(16, 2, local_prefill=False, corrects=corrects), 25.0)


def test_judging_by_the_predicted_load_stops_the_swing_and_serves_more() -> None:
    pairs = [compare(seed, corrects=False) for seed in (1, 2, 3)]
    for present, predicted in pairs:
        assert present.prefill_swing > 2 * predicted.prefill_swing
        assert present.slow > 2 * predicted.slow
    served_by_present = fmean(present.attainment for present, _ in pairs)
    assert fmean(predicted.attainment for _, predicted in pairs) > 2 * served_by_present


def test_what_is_learnt_of_past_errors_does_not_replace_what_is_on_its_way() -> None:
    present, predicted = compare(1, corrects=True)
    assert present.prefill_swing > 2 * predicted.prefill_swing
    assert predicted.attainment > 2 * present.attainment


def test_a_swing_counts_waves_and_neither_drift_nor_the_start() -> None:
    seconds = [i / 10 for i in range(600)]
    drift = [round(1000 + 20 * time_s) for time_s in seconds]
    waves = [round(1000 + 500 * sin(2 * pi * time_s / 5)) for time_s in seconds]
    assert rejection.swing(drift) < 0.05
    assert rejection.swing(waves) == pytest.approx(0.5 / 2**0.5, rel=0.01)
    assert rejection.swing([0] * 100 + [7] * 500) == 0
    assert rejection.swing([1, 3]) == 0.5


def test_results_are_shown_for_each_seed_and_way(tmp_path: Path) -> None:
    sways = compare(1, corrects=False)
    assert len(rejection.sheet({1: sways, 2: sways}, "title").rows) == 4
    rejection.plot(sways, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
