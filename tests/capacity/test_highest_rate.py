"""The highest rate that a cluster sustains is that of the long run, however many requests may be simulated."""

import pytest

from pdserve.capacity import planner
from pdserve.capacity.long_run import Question, measure
from pdserve.capacity.planner import Highest, highest_rate
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective
from pdserve.measure.tables import compared
from pdserve.measure.workload import Arrival, Workload, random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile
from tests.capacity.test_steady import attainment_of

PROFILE = read_profile(shipped_profile())
LOOSE = Objective(1e6, 1e6)
PROMPT = 1024
STEP_S = PROFILE.configuration(1).costs().prefill.seconds(PROMPT, PROMPT**2)
ONE_AT_A_TIME = Shape(0, 1, decode_chunk=PROMPT)  # a step computes one prompt, and answers have one token


def single_server(ttft_s: float, max_requests: int) -> Question:
    """A cluster that is a queue with Poisson arrivals, one server and services that all take STEP_S."""
    arrivals = tuple(Arrival(float(i), PROMPT, 1) for i in range(max_requests))
    workload = Workload("single server", arrivals).poisson(3)
    return Question(PROFILE, workload, Objective(ttft_s, 1e6), max_requests)


def overlap(one: Highest, other: Highest) -> bool:
    return one.at_least <= (other.below or float("inf")) and other.at_least <= (one.below or float("inf"))


@pytest.mark.long
def test_the_capacity_of_a_single_server_is_found() -> None:
    found = highest_rate(single_server(1e6, 6000), ONE_AT_A_TIME, "round_robin", 0.9)
    assert found.point is not None
    assert found.below is not None
    assert found.at_least <= 1 / STEP_S <= found.below
    assert found.point.rate_per_gpu * STEP_S == pytest.approx(1.0, abs=0.08)


@pytest.mark.long
@pytest.mark.parametrize("limit", [2.0, 4.0])
def test_the_rate_at_which_a_single_server_keeps_its_attainment_is_found(limit: float) -> None:
    found = highest_rate(single_server(limit * STEP_S, 20_000), ONE_AT_A_TIME, "round_robin", 0.9)
    assert found.is_settled
    assert found.point is not None
    assert found.below is not None
    assert attainment_of(found.at_least * STEP_S, limit) > 0.9 > attainment_of(found.below * STEP_S, limit)
    assert attainment_of(found.point.rate_per_gpu * STEP_S, limit) == pytest.approx(0.9, abs=0.02)


@pytest.mark.long
def test_the_answer_does_not_depend_on_how_many_requests_may_be_simulated() -> None:
    counts = (300, 2000, 6000)
    questions = [Question(PROFILE, random_lengths(count, 300, 10, 0), LOOSE, count) for count in counts]
    few, some, many = (highest_rate(question, Shape(0, 1), "round_robin", 0.9) for question in questions)
    assert overlap(few, some)
    assert overlap(some, many)
    assert overlap(few, many)
    assert some.point is not None
    assert many.point is not None
    assert some.point.rate_per_gpu == pytest.approx(many.point.rate_per_gpu, rel=0.15)
    assert few.point is None or few.point.rate_per_gpu < 1.15 * many.point.rate_per_gpu
    assert not few.is_settled


def test_a_rate_that_is_too_high_is_told_as_growing_though_no_objective_is_missed() -> None:
    question = single_server(1e6, 20_000)
    over = measure(question, ONE_AT_A_TIME, "round_robin", 1.3 / STEP_S)
    under = measure(question, ONE_AT_A_TIME, "round_robin", 0.6 / STEP_S)
    assert over.keeps_up is False
    assert over.growth == pytest.approx(1 - 1 / 1.3, abs=0.05)
    assert planner.figures(over)["keeps_up"] is False
    assert under.keeps_up is True
    assert under.is_settled


def test_what_too_few_requests_cannot_tell_is_not_settled() -> None:
    question = Question(PROFILE, random_lengths(20, 16, 2, 0), Objective(0.25, 0.1), 20)
    assert highest_rate(question, Shape(2, 2), "goodput", 0.9) == Highest(None, 0.0, None)
    point = measure(question, Shape(2, 2), "goodput", 5.0)
    assert point.is_settled is False
    shown = dict(compared([planner.figures(point)]).rows)
    unknown = ("attainment", "goodput per gpu", "refused", "missed", "keeps up")
    assert [shown[row] for row in unknown] == [["-"]] * len(unknown)
