"""What counts as a right answer, and what a run adds up to."""

import pytest

from pdserve.bench.asks import Lengths, draw_asks
from pdserve.bench.outcomes import Outcome, difference, percentile, tally

DUE = {0: (1, 2, 3), 1: (4,)}


@pytest.mark.parametrize(
    ("answers", "is_whole", "where"),
    [
        ({0: (1, 2, 3), 1: (4,)}, True, ""),
        ({0: (1, 2)}, False, ""),
        ({}, False, ""),
        ({0: (1, 2), 1: (4,)}, True, "continuation 0: 2 tokens came, 3 were due"),
        ({0: (1, 3)}, False, "continuation 0: token 1 of 3 is 3, 2 was due"),
        ({0: (1, 2, 3, 3), 1: (4,)}, False, "continuation 0: 4 tokens came, 3 were due"),
        ({0: (1, 2, 3), 1: (4,), 2: (5,)}, True, "continuations [2] were not asked for"),
    ],
)
def test_an_answer_is_right_as_far_as_it_goes_and_whole_once_it_has_ended(
    answers: dict[int, tuple[int, ...]], is_whole: bool, where: str
) -> None:
    assert difference(answers, DUE, is_whole=is_whole) == where


def test_a_run_counts_errors_wrong_tokens_and_moves_apart() -> None:
    outcomes = [
        Outcome(0, 0.0, 1.0, "OK", ttft_s=0.1, gap_s=0.2, num_tokens=5, attempts=1),
        Outcome(1, 0.0, 2.0, "OK", ttft_s=0.3, gap_s=0.9, num_tokens=5, attempts=3),
        Outcome(2, 0.0, 3.0, "OK", wrong="token 0", ttft_s=9.0, num_tokens=5, attempts=1),
        Outcome(3, 0.0, 4.0, "UNAVAILABLE", "no worker"),
    ]
    total = tally(outcomes)
    assert (total.num_requests, total.num_good, total.num_wrong, total.num_moved) == (4, 2, 1, 1)
    assert total.errors == {"UNAVAILABLE: no worker": 1}
    assert (total.goodput_per_s, total.tokens_per_s) == (0.5, 2.5)
    assert (total.ttft_max_s, total.moved_gap_max_s, total.most_attempts) == (0.3, 0.9, 3)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [0.1 * i for i in range(100)]
    assert percentile(values, 0.5) == values[49]
    assert percentile(values, 0.99) == values[98]
    assert percentile(values, 1.0) == values[99]
    assert percentile([], 0.5) is None


def test_equal_seeds_ask_the_same_and_within_the_lengths() -> None:
    lengths = Lengths(prompt=64, answer=8)
    asks = draw_asks(200, 512, lengths, seed=3)
    assert asks == draw_asks(200, 512, lengths, seed=3)
    assert asks != draw_asks(200, 512, lengths, seed=4)
    assert all(2 <= len(ask.prompt) <= 64 for ask in asks)
    assert {ask.params.temperature for ask in asks} == {0.0, 1.0}
    assert {ask.params.n for ask in asks} == {1, 2}
    assert max(ask.params.max_tokens for ask in asks) == 8
