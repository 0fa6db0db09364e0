"""Workers that slow each other down: what is learnt of it, and the machine that the simulator has for it."""

import random

import pytest

from pdserve.capacity.machine import Machine
from pdserve.perfmodel.crowding import Crowding
from pdserve.perfmodel.curve import Curve, DecodePiece, Step, StepCosts
from pdserve.perfmodel.fit import Fit
from pdserve.perfmodel.margin import Bias
from pdserve.perfmodel.model import LearntCosts
from pdserve.virtual_time import VirtualClock

PREFILL, DECODE = Curve(0.02, 7e-4, 1e-7), Curve(0.025, 2e-3, 1e-6)
COSTS = StepCosts(PREFILL, (DecodePiece(None, DECODE),))


@pytest.mark.parametrize("slowdown", [1.0, 1.3, 2.0])
def test_the_slowdown_and_the_cost_alone_are_told_apart(slowdown: float) -> None:
    rng, learnt = random.Random(3), LearntCosts()
    for number in range(1500):
        crowd = rng.choice([0.0, 0.0, 0.5, 1.0])
        step = Step(sequences=rng.randrange(1, 30), kv_tokens=rng.randrange(1, 10_000))
        if number % 3 == 0:
            step = Step(prefill_tokens=(tokens := rng.randrange(10, 1500)), prefill_work=tokens**2)
        learnt.observe(step, COSTS.seconds(step) * slowdown**crowd * rng.uniform(0.9, 1.1), 0.0, crowd)
    assert learnt.prefill_s(500, 500**2, 2048) == pytest.approx(PREFILL.seconds(500, 500**2), rel=0.08)
    assert learnt.decode_s(10, 3000) == pytest.approx(DECODE.seconds(10, 3000), rel=0.08)
    for expected in (learnt.prefill_slowdown(1.0), learnt.decode_slowdown(1.0)):
        assert expected == pytest.approx(slowdown, rel=0.08)


def test_nothing_is_learnt_of_neighbours_that_never_rest() -> None:
    crowding = Crowding()
    for _ in range(500):
        crowding.observe(1.0, 3.0)
    assert crowding.during(1.0) == pytest.approx(1.0)


def test_neighbours_are_never_taken_to_speed_a_step_up() -> None:
    crowding = Crowding()
    for number in range(500):
        crowding.observe(float(number % 2), 1.0 - 0.5 * (number % 2))
    assert crowding.during(1.0) == 1.0


def test_steps_on_one_machine_take_longer_for_as_long_as_both_run() -> None:
    clock, ended = VirtualClock(), dict[str, tuple[float, float]]()
    machine = Machine(clock)

    def begin(name: str, alone_s: float, slowdown: float) -> None:
        machine.begin(alone_s, slowdown, lambda elapsed_s: ended.update({name: (clock.now_s(), elapsed_s)}))

    clock.at(0.0, begin, "long", 3.0, 2.0)
    clock.at(1.0, begin, "short", 1.0, 1.5)
    clock.run()
    assert ended["short"] == (pytest.approx(2.5), pytest.approx(1.5))
    assert ended["long"] == (pytest.approx(3.75), pytest.approx(3.75))  # 1 alone, 0.75 beside the other, 1.25 alone


def test_what_adds_up_is_predicted_with_its_hiccups_and_what_does_not_without() -> None:
    rng = random.Random(5)
    usual, mean = Fit(DECODE, ((8.0, 1000.0),)), Fit(DECODE, ((8.0, 1000.0),), adds_up=True)
    for _ in range(4000):
        each, context = rng.randrange(1, 30), rng.randrange(1, 10_000)
        seconds = DECODE.seconds(each, context) * (4.0 if rng.random() < 0.1 else 1.0)
        usual.observe(each, context, seconds)
        mean.observe(each, context, seconds)
    assert mean.curve.seconds(10, 3000) == pytest.approx(1.3 * DECODE.seconds(10, 3000), rel=0.15)
    assert usual.curve.seconds(10, 3000) == pytest.approx(DECODE.seconds(10, 3000), rel=0.12)


@pytest.mark.parametrize("truth", [0.7, 1.0, 1.6])
def test_a_bias_is_found_whatever_the_noise(truth: float) -> None:
    rng, bias = random.Random(2), Bias()
    for _ in range(600):
        bias.observe(1.0, truth * rng.lognormvariate(0.0, 0.4))
    assert bias.factor == pytest.approx(truth, rel=0.15)
