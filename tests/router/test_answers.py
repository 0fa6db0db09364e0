"""How many answers there will be is what their ends say, step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.answers import Answers

Ends = st.lists(st.integers(0, 40), max_size=12)


def answers_of(ends: list[int]) -> Answers:
    answers = Answers()
    for end in ends:
        answers.add(end, 1)
    return answers


@given(Ends, st.integers(0, 30), st.integers(1, 30))
def test_the_mean_is_that_of_single_steps(ends: list[int], begin: int, num_steps: int) -> None:
    steps = range(begin, begin + num_steps)
    mean = sum(end > step for step in steps for end in ends) / num_steps
    assert answers_of(ends).mean_left(begin, num_steps) == pytest.approx(mean)
    assert answers_of(ends).num_left(begin) == sum(end > begin for end in ends)


@given(Ends, Ends)
def test_what_is_removed_leaves_no_trace(ends: list[int], others: list[int]) -> None:
    answers = answers_of(ends)
    assert answers.mean_left(0, 50) == pytest.approx(sum(ends) / 50)
    for end in others:
        answers.add(end, 2)
    for end in others:
        answers.remove(end, 2)
    assert len(answers) == len(ends)
    assert answers.mean_left(0, 50) == pytest.approx(sum(ends) / 50)
