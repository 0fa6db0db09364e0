"""What counts as a right answer, and what a run adds up to."""

from itertools import islice

import pytest

from pdserve.measure.chaos import tally
from pdserve.measure.known_answers import Lengths, difference, random_requests
from pdserve.measure.outcomes import Outcome

DUE = {0: (1, 2, 3), 1: (4,)}


@pytest.mark.parametrize(
    ("answers", "is_whole", "where"),
    [
        ({0: (1, 2, 3), 1: (4,)}, True, ""),
        ({0: (1, 2)}, False, ""),
        ({}, False, ""),
        ({0: (1, 2), 1: (4,)}, True, "continuation 0: 2 tokens came, 3 were expected"),
        ({0: (1, 3)}, False, "continuation 0: token 1 of 3 is 3, 2 was expected"),
        ({0: (1, 2, 3, 3), 1: (4,)}, False, "continuation 0: 4 tokens came, 3 were expected"),
        ({0: (1, 2, 3), 1: (4,), 2: (5,)}, True, "continuations [2] were not asked for"),
    ],
)
def test_an_answer_is_right_as_far_as_it_goes_and_whole_once_it_has_ended(
    answers: dict[int, tuple[int, ...]], is_whole: bool, where: str
) -> None:
    assert difference(answers, DUE, is_whole=is_whole) == where


def outcome(number: int, ended_s: float, ttft_s: float, gap_s: float, attempts: int) -> Outcome:
    made = Outcome(0.0, 10, 5, number=number, status="OK", attempts=attempts)
    made.take(2, ttft_s)
    made.take(3, ttft_s + gap_s)
    made.ended_s = ended_s
    return made


def test_a_run_counts_errors_wrong_tokens_and_retries_apart() -> None:
    wrong = outcome(2, 3.0, 9.0, 0.1, 1)
    wrong.wrong = "token 0"
    failed = Outcome(0.0, 10, 5, number=3, status="UNAVAILABLE", detail="no worker", ended_s=4.0)
    total = tally("chaos", [outcome(0, 1.0, 0.1, 0.2, 1), outcome(1, 2.0, 0.3, 0.9, 3), wrong, failed])
    assert (total.summary.num_requests, total.num_wrong, total.num_retried, total.most_attempts) == (4, 1, 1, 3)
    assert total.errors == {"UNAVAILABLE: no worker": 1}
    assert total.wrong_examples == ("request 2: token 0",)
    assert total.summary.goodput_per_s == 0.5
    assert total.gap_s is not None
    assert total.retried_gap_s is not None
    assert (total.gap_s.max, total.retried_gap_s.max) == (pytest.approx(0.9), pytest.approx(0.9))


def test_equal_seeds_ask_the_same_and_within_the_lengths() -> None:
    lengths = Lengths(prompt=64, answer=8)
    requests, again, others = (list(islice(random_requests(512, lengths, seed), 200)) for seed in (3, 3, 4))
    assert requests == again
    assert requests != others
    assert all(2 <= len(prompt) <= 64 for prompt, _ in requests)
    assert {params.temperature for _, params in requests} == {0.0, 1.0}
    assert {params.n for _, params in requests} == {1, 2}
    assert max(params.max_tokens for _, params in requests) == 8
