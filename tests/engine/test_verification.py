"""Guesses change no token, whatever they are: a real model answers with any drafter as it does without."""

from dataclasses import replace
from pathlib import Path

import pytest
from guessing_bench import (
    DRAFTERS,
    END,
    MOST,
    REPEATED,
    VOCAB,
    Bench,
    Name,
    add_requests,
    assert_same,
    ids,
)
from loaded_models import loaded_model
from long_cases import long, long_but
from model_zoo import prompt as zoo_prompt
from model_zoo import write_model
from small_models import small_config, small_model

from pdserve.model.family import Model
from pdserve.protocol.drafts import DraftSource, Verified
from pdserve.protocol.sampling import SamplingParams

ALWAYS = ("mostly_right", "ngram")


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB, eos_token_id=END))


@pytest.mark.parametrize("num_pages", [300, 14])  # with 14, sequences preempt each other
@pytest.mark.parametrize("drafter", long_but(ALWAYS, DRAFTERS))
def test_answers_are_those_without_guesses_in_tokens_ends_and_scores(
    model: Model, drafter: str, num_pages: int
) -> None:
    plain = add_requests(Bench(model)).run()
    bench = add_requests(Bench(model, num_pages, drafter, ids(plain.answers))).run()
    assert_same(bench, plain)
    assert bench.counts["guesses"] > 0
    if num_pages == 300:
        assert set(bench.scheduler.cache.spans) == set(plain.scheduler.cache.spans), "answers are found again"
    assert bool(bench.scheduler.num_preemptions) == (num_pages == 14)


def test_right_guesses_save_most_steps_and_lies_cost_none(model: Model) -> None:
    plain = add_requests(Bench(model)).run()
    steps = {
        drafter: add_requests(Bench(model, drafter=drafter, known=ids(plain.answers))).run().counts["steps"]
        for drafter in ("right", "liar")
    }
    assert steps["right"] < plain.counts["steps"] / 3
    assert steps["liar"] <= plain.counts["steps"]


def test_prompts_get_their_part_of_a_step_before_guesses(model: Model) -> None:
    planned = []
    for drafter in ("", "right"):
        bench = Bench(model, drafter=drafter, known={})
        bench.scheduler.limits = replace(bench.scheduler.limits, max_num_batched_tokens=12)
        bench.scheduler.step_tokens = bench.scheduler.step_tokens_beside = 12
        greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        bench.add(0, REPEATED[:8], greedy)
        plan = bench.scheduler.plan()
        assert plan is not None
        bench.commit(plan, bench.compute(plan))
        (sequence,) = bench.scheduler.running
        sequence.drafts = (7,) * MOST if drafter else ()
        bench.add(1, list(range(20, 40)), greedy)
        if drafter:
            assert bench.scheduler.speculation.counts([sequence])
        plan = bench.scheduler.plan()
        assert plan is not None
        planned.append([len(chunk.token_ids) for chunk in plan.chunks])
    assert planned == [[1, 11], [1, 11]]


def test_a_chunk_that_fails_by_its_guesses_alone_is_computed_without_them(model: Model) -> None:
    plain = Bench(model)
    plain.add(0, REPEATED, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    known = ids(plain.run().answers)
    bench = Bench(model, drafter="right", known=known, breaks_guesses=True)
    bench.add(0, REPEATED, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    bench.scheduler.speculation.source = DraftSource.MTP
    assert ids(bench.run().answers) == known
    assert bench.counts["guesses"] > 0
    assert not bench.broken
    assert bench.verified == []
    assert (bench.counts["guesses of work"], bench.counts["rows of work"]) == (0, 19)


def test_a_right_guess_that_ends_the_answer_is_counted_and_those_behind_it_are_not(model: Model) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = Bench(model)
    plain.add(0, REPEATED, params)
    known = ids(plain.run().answers)
    last = 3  # the first two tokens are sampled without guesses
    bench = Bench(model, drafter="right", known=known)
    bench.scheduler.speculation.source = DraftSource.MTP
    bench.add(0, REPEATED, replace(params, stop_token_ids=(known[0, 0][last],)))
    assert ids(bench.run().answers) == {(0, 0): known[0, 0][: last + 1]}
    assert bench.verified == [Verified(DraftSource.MTP, MOST, last - 1)]


def test_what_nobody_guesses_for_is_still_planned_ahead(model: Model) -> None:
    bench = Bench(model, drafter="right")  # and knows no answer
    bench.add(0, list(range(20, 80)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    bench.run()
    assert bench.counts["guesses"] == 0
    assert bench.counts["ahead"] == 3


@pytest.mark.parametrize("family", ["gemma2", "gemma4-shared", *long("gpt-oss", "mixtral", "cohere2", "deepseek-v3")])
def test_windows_sinks_experts_and_latents_are_served_with_guesses(tmp_path: Path, family: str) -> None:
    loaded = loaded_model(write_model(family, tmp_path))
    asked = [[*zoo_prompt(length), *zoo_prompt(9)] for length in (150, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain, known = Bench(loaded, 200), dict[Name, list[int]]()
    for drafter in ("", "mostly_right", "ngram"):
        bench = Bench(loaded, 200, drafter, known)
        for number, each in enumerate(asked):
            bench.add(number, each, params)
        bench.run()
        if not drafter:
            plain, known = bench, ids(bench.answers)
        assert ids(bench.answers) == known
        if drafter == "mostly_right":
            assert bench.counts["steps"] < plain.counts["steps"] / 1.5
