"""A draft model changes no token, and the steps that its guesses save show that it knows each sequence."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from guessing_bench import (
    END,
    MOST,
    REPEATED,
    VOCAB,
    Bench,
    add_requests,
    answered_alike,
    assert_same,
    ids,
)
from loaded_models import loaded_model
from long_cases import long
from model_zoo import prompt as zoo_prompt
from model_zoo import write_model
from small_models import small_config, small_model

from pdserve.engine.step import StepPlan, StepResult
from pdserve.engine.verification import Run
from pdserve.model.family import Model
from pdserve.perfmodel.curve import Step
from pdserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=60, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB, eos_token_id=END))


@pytest.fixture(scope="module")
def other() -> Model:
    """Return a model of one layer, which is nearly always wrong."""
    return small_model(small_config(VOCAB, eos_token_id=END, num_hidden_layers=1, hidden_size=32))


def before_each(act: Callable[[int, StepPlan], None]) -> Callable[[Run], Run]:
    """Return what does something before each step of a draft model. act: takes the number of the step, from 1."""

    def around(run: Run) -> Run:
        numbers = count(1)

        def act_and_run(plan: StepPlan) -> StepResult:
            act(next(numbers), plan)
            return run(plan)

        return act_and_run

    return around


@pytest.mark.parametrize("num_pages", [300, 14])  # with 14, sequences preempt each other
@pytest.mark.parametrize("drafts_itself", [True, False])
def test_answers_are_those_without_a_draft_model_in_tokens_ends_and_scores(
    model: Model, other: Model, drafts_itself: bool, num_pages: int
) -> None:
    plain = add_requests(Bench(model)).run()
    bench = add_requests(Bench(model, num_pages, draft=model if drafts_itself else other)).run()
    assert_same(bench, plain)
    assert bench.counts["guesses"] > 0
    assert bool(bench.scheduler.num_preemptions) == (num_pages == 14)


def test_a_draft_model_that_is_the_model_itself_is_right_with_penalties_noise_and_grammars(model: Model) -> None:
    bench = add_requests(Bench(model, draft=model)).run()
    num_ends = 3  # of answers with a grammar, which lets nothing follow: that is no right guess
    assert bench.counts["guesses"] - num_ends <= bench.counts["right"] > 100


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("length", [16, 40, 120])
def test_one_answer_takes_as_many_steps_as_right_guesses_leave(
    model: Model, params: SamplingParams, length: int
) -> None:
    bench = Bench(model, draft=model)
    bench.add(0, [10 + place % 70 for place in range(length)], params)
    bench.run()
    num_fed = length // 64 + length // 7 + length // 128 + 3  # steps until the draft model has computed the prompt
    assert bench.counts["steps"] <= num_fed + 12 + 60 / (MOST + 1)  # twelve more: what guesses cost and bring is learnt
    assert bench.counts["right"] == bench.counts["guesses"]


def test_a_draft_model_that_is_wrong_is_used_less_and_less(model: Model, other: Model) -> None:
    plain, bench = Bench(model), Bench(model, draft=other)
    answered_alike(plain, bench, (REPEATED, replace(GREEDY, max_tokens=300)))
    assert bench.counts["right"] < bench.counts["guesses"] / 4
    assert bench.counts["guesses"] < 150


def test_a_prefix_that_another_sequence_left_is_computed_again_for_the_draft_model(model: Model) -> None:
    plain, bench = Bench(model), Bench(model, draft=model)
    for each in (plain, bench):
        for number in range(3):
            each.add(number, [*range(10, 74), 20 + number], replace(SAMPLED, seed=number))
            each.run()
            if each is bench:
                bench.draft_runner.kv.normal_()
    assert ids(bench.answers) == ids(plain.answers)
    assert bench.counts["right"] == bench.counts["guesses"] > 50


def test_no_guesses_are_made_beyond_the_draft_models_longest_sequence(model: Model) -> None:
    longest = 0

    def look(_: int, plan: StepPlan) -> None:
        nonlocal longest
        longest = max([longest, *(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)])

    plain = Bench(model)
    bench = Bench(model, draft=model, draft_model_len=50, draft_run=before_each(look))
    answered_alike(plain, bench, (REPEATED, GREEDY), (REPEATED * 3, GREEDY))
    assert 40 < longest <= 50


def test_a_draft_model_that_fails_is_given_up_and_ends_no_request(model: Model) -> None:
    num_runs = 0

    def fail(number: int, _: StepPlan) -> None:
        nonlocal num_runs
        num_runs = number
        if number > 20:
            raise RuntimeError("broken on purpose")

    failing = Bench(model, draft=model, draft_run=before_each(fail))
    plain, bench = add_requests(Bench(model)).run(), add_requests(failing).run()
    assert ids(bench.answers) == ids(plain.answers)
    assert not bench.broken
    assert num_runs == 21
    assert bench.counts["ahead"] > 0, "steps are planned ahead again"


def test_kv_that_others_write_to_the_draft_models_pages_spoils_guesses_alone(model: Model) -> None:
    def overwrite(number: int, _: StepPlan) -> None:
        if number % 3 == 0:
            bench.draft_runner.kv.normal_()

    plain = add_requests(Bench(model)).run()
    bench = Bench(model, draft=model, draft_run=before_each(overwrite))
    add_requests(bench).run()
    assert ids(bench.answers) == ids(plain.answers)
    assert bench.counts["right"] < 0.9 * bench.counts["guesses"], "some are spoiled"


def test_nothing_is_drafted_for_more_sequences_than_passes_have_room_for(model: Model) -> None:
    """Others than routers' counts allow may join; `limits_of_passes` is of max_num_seqs."""
    bench = Bench(model, draft=model)
    bench.scheduler.limits = replace(bench.scheduler.limits, max_num_seqs=0)
    bench.add(0, REPEATED, GREEDY)
    bench.run()
    assert bench.counts["guesses"] == 0


def test_a_loaded_worker_tries_a_few_guesses_and_plans_ahead(model: Model) -> None:
    bench = Bench(model, draft=model, row_s=1.0)
    for _ in range(20):
        for rows in range(1, 8):
            bench.scheduler.speculation.observe(Step(sequences=rows, kv_tokens=30 * rows), 0.01 + rows)
    bench.add(0, REPEATED, replace(GREEDY, max_tokens=300))
    bench.run()
    assert bench.counts["ahead"] > 100
    assert 0 < bench.counts["guesses"] < 150


@pytest.mark.parametrize("family", ["gemma2", "deepseek-v2", *long("gpt-oss", "llama4", "mixtral")])
def test_models_with_windows_latent_rows_and_experts_are_drafted_for(tmp_path: Path, family: str) -> None:
    target, draft = (loaded_model(write_model(each, tmp_path / each)) for each in (family, "llama3"))
    asked = [[*zoo_prompt(length), *zoo_prompt(9)] for length in (150, 30)]
    plain, bench = Bench(target, 200), Bench(target, 200, draft=draft)
    answered_alike(plain, bench, *[(tokens, GREEDY) for tokens in asked])
    assert bench.counts["guesses"] > 0
