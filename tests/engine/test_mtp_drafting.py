"""A model's own module changes no token, and guesses what transformers' layer with its weights guesses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from guessing_bench import Bench, answered_alike
from long_cases import long
from model_zoo import prompt as zoo_prompt
from mtp_modules import MtpOracle, Naming, write_model_with_a_module_that_is_often_right, write_model_with_module

from pdserve.checkpoint.hf_directory import open_directory
from pdserve.executor.draft_loading import with_room
from pdserve.executor.head_files import open_mtp
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.model.mtp import MtpHead
from pdserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=25)
SAMPLED = replace(SHORT, temperature=0.8, top_p=0.9, n=2, frequency_penalty=0.3, seed=4)


def loaded(folder: Path) -> tuple[Model, MtpHead]:
    checkpoint = open_directory(folder)
    files = open_mtp(checkpoint)
    config = with_room(checkpoint, files).config
    model = load_model(config, checkpoint.weights(), torch.float32)
    return model, files.load(model)


@pytest.mark.parametrize(
    "family", ["deepseek-v3", "qwen3.5", *long("glm4-moe", "glm4-lite", "qwen3-next", "qwen3.5-moe")]
)
def test_a_module_guesses_what_it_is_defined_to_guess(tmp_path: Path, family: str) -> None:
    model, head = loaded(write_model_with_module(family, tmp_path))
    plain, bench, oracle = Bench(model, 200), Bench(model, 200, head=head), MtpOracle.of(tmp_path, Naming.of(family))
    answered_alike(plain, bench, *[(zoo_prompt(length, seed=n), GREEDY) for n, length in enumerate((150, 30, 17))])
    drafted = [(known, list(guesses)) for _, known, guesses in bench.drafted if guesses]
    assert len(drafted) > 30
    for known, guesses in drafted:
        assert guesses == oracle.guesses_of(known, len(guesses)), f"{len(known)} tokens"


def test_a_module_knows_a_prefix_that_another_sequence_left(tmp_path: Path) -> None:
    model, head = loaded(write_model_with_module("deepseek-v3", tmp_path))
    bench, oracle = Bench(model, 200, head=head), MtpOracle.of(tmp_path)
    for number in range(2):
        bench.add(number, [*zoo_prompt(64), 20, 30 + number], replace(GREEDY, max_tokens=9))
        bench.run()
    drafted = [(known, list(guesses)) for each, known, guesses in bench.drafted if guesses and each.num_cached_tokens]
    assert drafted
    for known, guesses in drafted:
        assert guesses == oracle.guesses_of(known, len(guesses))


@pytest.mark.parametrize(
    ("family", "num_pages"), [("deepseek-v3", 200), ("deepseek-v3", 13), ("qwen3.5", 200), ("qwen3.5", 9)]
)
def test_answers_are_those_without_a_module(tmp_path: Path, family: str, num_pages: int) -> None:
    model, head = loaded(write_model_with_module(family, tmp_path))
    plain, bench = Bench(model, 200), Bench(model, num_pages, head=head)
    params = (SHORT, SAMPLED, replace(SAMPLED, n=1, seed=8), SHORT)
    answered_alike(plain, bench, *[(zoo_prompt(20 + 9 * n, seed=n), each) for n, each in enumerate(params)])
    assert bench.ends == plain.ends
    assert bench.counts["guesses"] > 20
    assert bool(bench.scheduler.num_preemptions) == (num_pages < 20)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3.5", *long("qwen3-next")])
def test_right_guesses_of_a_module_save_steps(tmp_path: Path, family: str) -> None:
    model, head = loaded(write_model_with_a_module_that_is_often_right(family, tmp_path))
    plain, bench = Bench(model, 200), Bench(model, 200, head=head)
    answered_alike(plain, bench, (zoo_prompt(20), GREEDY))
    assert bench.counts["right"] > 0.5 * bench.counts["guesses"] > 10
    assert bench.counts["steps"] < 0.7 * plain.counts["steps"]
