"""How long answers get."""

from dataclasses import dataclass

import pytest
from goodput_cluster import COSTS, Cluster, placed

from pdserve.perfmodel.curve import Step
from pdserve.protocol.refusal import Cause
from pdserve.router.placement.learnt import AnswerLengths
from pdserve.router.placement.predict import Prompt
from pdserve.router.requests.events import StepReported


@dataclass(frozen=True)
class Tokens:
    """As they come off the wire."""

    request_id: bytes
    position: int = 0
    attempt: int = 0
    index: int = 0
    token_ids: tuple[int, ...] = (7,)
    logprobs: tuple[object, ...] = ()
    finish_reason: int = 0
    drafts: tuple[object, ...] = ()


def test_answers_longer_than_expected_still_slow_down_those_that_join() -> None:
    cluster = Cluster()
    for number in range(1000):
        max_tokens = 10 + 99 * (number % 11)
        cluster.predictor.lengths.observe(max_tokens * (2 + number % 2 * 2) // 5, max_tokens)
    for _ in range(20):
        place = placed(cluster.arrive(100, max_tokens=20))
        first = Tokens(place.spec.request_id)
        cluster.post(StepReported(cluster.links["p0"], [first], Step(100, 10_000), 0.03))
    step = Step(sequences=20, kv_tokens=2000)
    for _ in range(18):
        cluster.now_s += 0.04
        cluster.post(StepReported(cluster.links["d0"], [], step, 0.04))
    place = placed(cluster.arrive(100, max_tokens=20))
    assert cluster.predicted_s(place)[1] > COSTS.seconds(Step(sequences=12)), "20 were there when it came"


def test_answers_are_as_long_as_the_better_guess() -> None:
    exact, generous = AnswerLengths(), AnswerLengths()
    for number in range(500):
        length = 10 + 90 * (number % 2)
        exact.observe(length, length)
        generous.observe(30 + number % 5, 1000 * (1 + number % 7))
    assert exact.expected(77) == pytest.approx(77, rel=0.02)
    assert generous.expected(5000) == pytest.approx(32, rel=0.05)
    assert generous.expected(20) == 20


def test_what_is_overdue_goes_on_for_as_long_as_answers_have_been_overdue() -> None:
    lengths = AnswerLengths()
    for number in range(500):  # half as expected, half twice as long
        lengths.observe(50 + 100 * (number % 2), 1000)
    assert lengths.overdue_tokens == pytest.approx(50, rel=0.2)
    exact = AnswerLengths()
    for _ in range(500):
        exact.observe(70, 70)
    assert exact.overdue_tokens == 1.0


def test_a_clients_word_of_its_answers_length_is_believed_while_it_is_nearer_than_the_guess() -> None:
    honest, wild = AnswerLengths(), AnswerLengths()
    for number in range(40):
        num_tokens = 20 if number % 2 else 400
        honest.observe(num_tokens, 1000, hinted=num_tokens + 5)
        wild.observe(num_tokens, 1000, hinted=1000 - num_tokens)
    assert honest.expected(1000, 300) == 300
    assert honest.expected(100, 300) == 100
    assert honest.left(250, 1000, 300) >= 50
    assert wild.expected(1000, 300) == wild.expected(1000) != 300
    assert AnswerLengths().expected(1000, 77) == 77  # before anything was seen


def test_a_false_word_of_one_client_makes_no_others_answers_seem_overdue_for_longer() -> None:
    silent, lied_to = AnswerLengths(), AnswerLengths()
    for number in range(460):
        num_tokens = 2000 if number >= 400 else 100
        silent.observe(num_tokens, 4096)
        lied_to.observe(num_tokens, 4096, hinted=1 if number >= 400 else 100)
    assert lied_to.overdue_tokens == silent.overdue_tokens


def test_a_word_of_a_short_answer_brings_nothing_where_others_answers_would_not_fit() -> None:
    cluster = Cluster()
    for _ in range(200):
        cluster.predictor.lengths.observe(200, 1000)
    for _ in range(10):
        placed(cluster.arrive(1000, max_tokens=1000))
    decode = cluster.core.placements.workers.known(cluster.links["d0"])

    def most_tokens(hinted: int) -> int:
        """Return the longest prompt for which there is room."""
        lengths = range(100, 8000, 20)
        lacks = [cluster.predictor.decode_step(decode, Prompt(each, 1, {}, 0, 1000, hinted))[1] for each in lengths]
        return lengths[lacks.index(Cause.PAGES)]

    assert most_tokens(1) == most_tokens(0)
    assert most_tokens(1000) < most_tokens(0), "one that says more than others take needs more"
