"""For testing, a worker's steps can take their time, as if it owned a device."""

import time

import pytest

from faultsim.engine import FakeRunner
from pdserve.base.ids import PageId
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.launching import PACED_TOKENS, paced

COPY = ((PageId(0), PageId(1)),)


def elapsed_s(plan: StepPlan, step_s: float) -> float:
    began_s = time.perf_counter()
    paced(FakeRunner(2, PACED_TOKENS, 997).run, step_s)(plan)
    return time.perf_counter() - began_s


@pytest.mark.parametrize(("num_tokens", "least_s"), [(1, 0.05), (PACED_TOKENS, 0.1)])
def test_a_step_takes_its_time_and_that_of_its_tokens(num_tokens: int, least_s: float) -> None:
    assert elapsed_s(StepPlan((Chunk([1] * num_tokens, 0, (PageId(0),), ()),), COPY), 0.05) >= least_s


def test_pages_that_are_copied_before_a_step_take_no_time_of_their_own() -> None:
    assert elapsed_s(StepPlan((), COPY), 10.0) < 5.0
