"""Ranks with a device each verify guesses, and compute heads together: tokens are those of one CPU without guesses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eagle3_heads import random_head_beside
from engine_runs import engine_of, worker_config
from greedy_runs import spec
from guesses_of_ranks import ALONE, DEVICES, OWN, SHORT, SMALL, assert_guesses_change_no_token
from model_zoo import write_model
from mtp_modules import SMALL as SMALL_MODULES
from mtp_modules import write_model_with_module
from rank_pages import pages_of, ranks, whole_page

from pdserve.base.errors import ConfigError
from pdserve.base.ids import PageId
from pdserve.engine.step import Bits, Chunk, Draft, Phase, StepPlan, StepResult
from pdserve.kvtransfer.routes import Share

Guessed = dict[str, object]
MTP: Guessed = {"method": "mtp"}
WINDOWS = {"sliding_window": 24}


def with_itself(model: Path) -> Guessed:
    return {"method": "draft_model", "model": str(model)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("llama3", "ngram", DEVICES),
        ("llama3", "suffix", ALONE),
        ("gpt-oss", "suffix", DEVICES),
        ("deepseek-v3", "ngram", DEVICES),
    ],
)
def test_looked_up_guesses_change_no_token_of_ranks_with_devices(
    family: str, method: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model = write_model(family, tmp_path, num_hidden_layers=1 if family == "llama3" else 2)
    first, again = assert_guesses_change_no_token(model, SHORT, {"method": method}, **SMALL, **settings)
    assert first.num_guesses > 0
    assert again.num_cached > len(SHORT[0][0]), "pages that steps with guesses have filled"


@pytest.mark.long
@pytest.mark.parametrize("settings", [ALONE, DEVICES], ids=str)
def test_a_draft_model_on_the_first_of_ranks_with_devices_changes_no_token(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    model = write_model("llama3", tmp_path, num_hidden_layers=1)
    first, _ = assert_guesses_change_no_token(model, SHORT, with_itself(model), **SMALL, **settings)
    assert first.num_right == first.num_guesses > 0, "it is the same model"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape", "settings"),
    [
        ("llama3", {}, DEVICES),
        ("llama3", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, DEVICES),
        ("llama3", {}, ALONE),
        ("qwen2", {}, DEVICES),
        ("qwen3-moe", {}, DEVICES),
        ("gemma2", WINDOWS, DEVICES),
        ("gpt-oss", WINDOWS, DEVICES),
    ],
)
def test_a_head_that_ranks_with_devices_divide_guesses_what_it_guesses_on_one_cpu(
    family: str, shape: dict[str, int], settings: dict[str, object], tmp_path: Path
) -> None:
    model = write_model(family, tmp_path, **shape)
    assert_same_guesses(model, random_head_beside(model), settings)


@pytest.mark.long
@pytest.mark.parametrize("settings", [ALONE, DEVICES], ids=str)
@pytest.mark.parametrize("family", SMALL_MODULES)
def test_a_module_that_ranks_with_devices_divide_guesses_what_it_guesses_on_one_cpu(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    shape = {**SMALL_MODULES[family], **({"num_key_value_heads": 2} if family == "glm4-moe" else {})}
    assert_same_guesses(write_model_with_module(family, tmp_path, **shape), MTP, settings)


def assert_same_guesses(model: Path, guessed: Guessed, settings: dict[str, object]) -> None:
    on_cpu = assert_guesses_change_no_token(model, SHORT, guessed, **SMALL)
    on_ranks = assert_guesses_change_no_token(model, SHORT, guessed, **SMALL, **settings)
    for ours, theirs in zip(on_ranks, on_cpu, strict=True):
        assert ours.drafted == theirs.drafted
    assert sum(len(guesses) for _, guesses in on_ranks[0].drafted) > 5


PAGE = PageId(5)
NUM_KEPT = 5  # tokens of which K and V count when the plans are over


def plans(right: Sequence[int], num_heads: int) -> list[StepPlan]:
    """Return a prompt in two parts, and a step of a right guess and a wrong one, behind which a head guesses twice."""
    tokens = (right[0], right[1], (right[2] + 1) % 90)
    draft = Draft((), 3, 2)
    part, rest = Chunk((1, 2), 0, (PAGE,), (), following=300), Chunk((300,), 2, (PAGE,), (spec(),))
    second = Chunk(tokens, 3, (PAGE,), (spec(right[:1]),), Phase.DECODE, num_drafts=2, draft=draft)
    return [StepPlan((chunk,)) for chunk in (part, rest, second)]


def kept_rows(page: np.ndarray, page_size: int = 16) -> np.ndarray:
    """Return K and V of the tokens that count. page: [layers, K and V, heads, tokens and features]."""
    return page.reshape(*page.shape[:3], page_size, -1)[..., :NUM_KEPT, :]


@pytest.mark.long
def test_each_rank_has_kv_of_its_own_heads_of_a_head_also_behind_a_wrong_guess(tmp_path: Path) -> None:
    model, whole = write_model("llama3", tmp_path), Share((0, 4), (0, 2))
    guessed, right = {**random_head_beside(model), "num_speculative_tokens": 2}, list[int]()
    found, pages = [], []
    for settings in (OWN, DEVICES):
        config = worker_config(model, speculative_config=guessed, max_num_seqs=1, **settings)
        with engine_of(config) as engine:
            while len(right) < 3:  # what follows, without guesses
                known = (1, 2, 300, *right)  # the last of them is of rank 1's part of the vocabulary
                step = engine.executor.start(StepPlan((Chunk(known, 0, (PAGE,), (spec(right),)),)))
                right.append(step.result(60).tokens[0][0][0].token_id)
            _, *results = (engine.executor.start(plan).result(60) for plan in plans(right, 2))
            assert sampled(results[1]) == right[1:], "one guess is kept, and a token sampled behind it"
            found.append([sampled(results[0]), results[1].drafts])
            pages.append(kept_rows(whole_page(pages_of(engine.executor, whole), PAGE)))
            assert not any(result.num_draft_failures for result in results)
    assert found[0] == found[1]
    assert len(found[0][1][0]) == 2
    np.testing.assert_allclose(pages[1], pages[0], atol=1e-5)
    assert np.abs(pages[0]).min(axis=-1).max(axis=0).all(), "no row is missing"


def sampled(result: StepResult) -> list[int]:
    return [token.token_id for token in result.tokens[0][0]]


class Broken:
    """A grammar that fails where tokens are sampled, between the last sum of a step and what a head takes in."""

    is_ready = True

    def fill(self, output_ids: Sequence[int], bits: Bits) -> None:
        raise ZeroDivisionError(len(output_ids))


@pytest.mark.long
def test_a_request_that_cannot_be_sampled_fails_alone_where_other_ranks_wait_to_take_in(tmp_path: Path) -> None:
    model = write_model("llama3", tmp_path)
    good = Chunk((1, 2, 3), 0, (PAGE,), (spec(),))
    wrong = Chunk((7, 8), 0, (PageId(1),), (replace(spec(), matcher=Broken()),))
    with engine_of(worker_config(model, speculative_config=random_head_beside(model), **SMALL, **DEVICES)) as engine:
        steps = [engine.executor.start(StepPlan(chunks)) for chunks in ((good,), (good, wrong), (good,))]
        before, failed, after = (step.result(60) for step in steps)
    assert list(failed.failed) == [1]
    assert sampled(before) == sampled(failed) == sampled(after)


@pytest.mark.long
def test_a_pass_of_a_head_that_fails_behind_the_last_sum_is_counted_and_ends_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("llama3", tmp_path)
    with engine_of(worker_config(model, speculative_config=random_head_beside(model), **SMALL, **DEVICES)) as engine:

        def failing(*_: object) -> None:
            raise MemoryError("once")

        monkeypatch.setattr("pdserve.engine.head_cuda.drawn", failing)
        results = [engine.executor.start(plan).result(60) for plan in plans((3, 4, 5), 2)]
        assert len(ranks()) == 1
    assert [result.num_draft_failures for result in results] == [0, 0, 1]


def test_heads_beside_quantized_models_of_ranks_with_devices_are_refused_by_name(tmp_path: Path) -> None:
    model = write_model("llama3", tmp_path)
    config = worker_config(model, speculative_config=random_head_beside(model), quantization="int8", **DEVICES)
    problem = "method: eagle3 is not served beside several ranks with dtype float32 and quantization int8 yet"
    with pytest.raises(ConfigError, match=problem), engine_of(config):
        pass
