"""A draft model on the kernels' runner: it changes no token, and saves steps where it is right."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from eagle3_heads import head_config, random_head, write_head
from engine_answers import written
from guessing_bench import MOST, REPEATED, Bench, assert_same, ids
from kernel_bench import GREEDY, LISTED, KernelBench, answered, answered_mixed, one_layer
from model_zoo import write_model
from torch import Tensor

from pdserve.engine import verification
from pdserve.engine.replays import Replays
from pdserve.model.family import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return one_layer()


@pytest.fixture(scope="module")
def other() -> Model:
    """Return a model that is nearly always wrong."""
    return one_layer(hidden_size=32)


@pytest.mark.long
def test_kernels_sample_behind_a_draft_model_what_a_cpu_samples_without(model: Model, other: Model) -> None:
    plain = answered_mixed(Bench(model))
    for draft in (model, other):
        bench = answered_mixed(KernelBench(model, 60, draft=draft))
        assert_same(bench, plain)
        assert bench.counts["guesses"] > 20
        assert not bench.counts["draft failures"]
    assert tuple(ids(plain.answers)[5, 0]) in LISTED


@pytest.mark.long
def test_a_draft_model_on_kernels_is_right_with_penalties_noise_and_grammars_if_it_is_the_model(model: Model) -> None:
    bench = answered_mixed(KernelBench(model, 60, draft=model))
    num_ends = 1  # of the answer with a grammar, behind which nothing follows
    assert bench.counts["guesses"] - num_ends <= bench.counts["right"] > 20


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_of_the_model_itself_save_nearly_all_steps_of_kernels(model: Model, temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, seed=5, max_tokens=60)
    bench = answered(KernelBench(model, 60, draft=model), params)
    assert bench.counts["right"] == bench.counts["guesses"]
    assert bench.counts["steps"] <= 6 + 12 + 60 / (MOST + 1)  # six for the prompts; twelve: costs and gains are learnt


@pytest.mark.long
def test_sequences_that_preempt_each_other_on_kernels_keep_their_tokens_with_a_draft_model(model: Model) -> None:
    params = replace(GREEDY, max_tokens=30)
    plain = answered(Bench(model), params, params, params)
    bench = answered(KernelBench(model, 8, draft=model), params, params, params)
    assert bench.scheduler.num_preemptions > 0
    assert bench.counts["right"] > 10
    assert_same(bench, plain)


@pytest.mark.long
def test_an_answer_stops_within_a_chain_of_a_draft_models_guesses_on_kernels(model: Model) -> None:
    params = replace(GREEDY, max_tokens=60)
    answer = ids(answered(Bench(model), params).answers)[0, 0]
    place = next(place for place in range(40, len(answer)) if answer[place] not in answer[:place])
    params = replace(params, stop_token_ids=(answer[place],), ignore_eos=False)
    plain, bench = answered(Bench(model), params), answered(KernelBench(model, 60, draft=model), params)
    assert_same(bench, plain)
    assert len(plain.answers[0, 0]) == place + 1
    assert 1 + bench.counts["steps"] + bench.counts["right"] > place + 1, "guesses behind it were right"


@pytest.mark.long
def test_passes_of_a_draft_model_on_kernels_are_replayed_in_captured_sizes(
    model: Model, other: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[Replays, set[int]] = {}

    def replayed(replays: Replays, size: int, step: Callable[[], Tensor]) -> Tensor:
        sizes.setdefault(replays, set()).add(size)
        return step()

    monkeypatch.setattr(Replays, "run", replayed)
    answered(KernelBench(model, 60, draft=other), *[GREEDY] * 3, prompt=REPEATED[:2])
    of_model, of_draft = sizes.values()
    assert {1, 4} <= of_model | of_draft
    assert max(of_draft) <= 16, "two rows of each of eight sequences"


@pytest.mark.long
def test_a_wrong_guess_of_a_draft_model_that_is_kept_would_change_the_kernels_answer(
    model: Model, other: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = partial(answered, prompt=REPEATED[:2])
    plain = short(Bench(model), GREEDY)
    kept = verification._kept
    monkeypatch.setattr(
        verification,
        "_kept",
        lambda chunk, sampled, stuck: tuple(of[0][0] for of in sampled[: len(kept(chunk, sampled, stuck)) + 1]),
    )
    bench = short(KernelBench(model, 60, draft=other), GREEDY)
    assert ids(bench.answers) != ids(plain.answers)


def test_a_draft_model_that_fails_on_kernels_ends_no_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bench = answered(Bench(model), GREEDY), KernelBench(model, 60, draft=model)

    def broken(plan: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(bench.drafter_on_kernels, "draft", broken)
    assert_same(answered(bench, GREEDY), plain)
    assert bench.counts["draft failures"] == 1


@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_worker_loads_what_guesses_beside_its_model_on_kernels(tmp_path: Path, method: str) -> None:
    target = write_model("qwen3", tmp_path / "model")
    if method == "eagle3":
        config = head_config(json.loads((target / "config.json").read_text()), 200, (0, 1, 2))
        guessing = write_head(tmp_path / "head", config, random_head(config))
    else:
        guessing = write_model("llama3", tmp_path / "draft")
        shutil.copy(target / "tokenizer.json", guessing / "tokenizer.json")
    given = {"method": method, "model": str(guessing), "num_speculative_tokens": 3}
    tokens, num_guesses = written(target, device="interpreter", speculative_config=given)
    assert (tokens, 0) == written(target, device="cpu")
    assert num_guesses > 0
