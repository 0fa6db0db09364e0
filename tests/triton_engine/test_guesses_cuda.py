"""The kernels' runner verifies guesses, and samples what the CPU's engine samples without any."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
from guessing_bench import END, PAGE_SIZE, REPEATED, Bench, Name, assert_same, ids
from kernel_bench import GREEDY, LISTED, PENALIZED, KernelBench, answered, answered_mixed, one_layer
from loaded_models import loaded_model
from long_cases import long
from model_zoo import prompt as zoo_prompt
from model_zoo import write_model
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.engine import counted_rows, verification
from pdserve.engine.replays import Replays
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, Tokens
from pdserve.kernels.sample import Ragged
from pdserve.model.family import Model
from pdserve.protocol.sampling import SamplingParams


@pytest.fixture(scope="module")
def model() -> Model:
    return one_layer()


@pytest.mark.long
def test_kernels_sample_with_right_and_wrong_guesses_what_a_cpu_samples_without(model: Model) -> None:
    plain = answered_mixed(Bench(model))
    known = ids(plain.answers)
    bench = answered_mixed(KernelBench(model, 60, "mostly_right", known))
    assert_same(bench, plain)
    assert tuple(known[5, 0]) in LISTED
    assert bench.counts["guesses"] > bench.counts["right"] > 12
    assert bench.counts["steps"] < plain.counts["steps"]


@pytest.mark.parametrize("penalty", [*long(1.0), 1.1])
def test_kernels_take_fewer_steps_where_a_text_repeats_also_with_penalties(model: Model, penalty: float) -> None:
    bias = ((REPEATED[0], 100.0),)
    params = replace(GREEDY, max_tokens=16, logit_bias=bias, repetition_penalty=penalty, frequency_penalty=penalty - 1)
    plain, bench = (answered(each, params) for each in (Bench(model), KernelBench(model, 60, "ngram")))
    assert_same(bench, plain)
    assert plain.counts["steps"] - bench.counts["steps"] >= 8


@pytest.mark.long
def test_penalties_count_the_guesses_before_a_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(PENALIZED, max_tokens=14, frequency_penalty=0.5)
    plain = answered(Bench(model), params)
    monkeypatch.setattr(counted_rows, "count", without_guesses)
    bench = answered(KernelBench(model, 60, "right", ids(plain.answers)), params)
    assert ids(bench.answers) != ids(plain.answers)


def without_guesses(counts: Tensor, slots: Tensor, is_output: Tensor, token_ids: Ragged) -> None:
    if not is_output.all():
        _COUNT(counts, slots, is_output, token_ids)


_COUNT = counted_rows.count


def stopped(model: Model) -> tuple[SamplingParams, Mapping[Name, Seq[int]]]:
    """Return a request that ends within a run of guesses, and the answer that it has without that stop."""
    answer = ids(answered(Bench(model), GREEDY).answers)[0, 0]
    place = next(place for place in range(4, len(answer)) if answer[place] not in answer[:place])
    return replace(GREEDY, stop_token_ids=(answer[place],), ignore_eos=False), {(0, 0): answer}


def test_an_answer_stops_within_the_guesses_that_kernels_verify(model: Model) -> None:
    params, known = stopped(model)
    plain = answered(Bench(model), params)
    bench = answered(KernelBench(model, 60, "right", known), params)
    assert_same(bench, plain)
    assert 1 + bench.counts["steps"] + bench.counts["right"] > len(plain.answers[0, 0]), "guesses behind it were right"


def test_rows_that_verify_guesses_are_replayed_as_so_many_sequences(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def replayed(replays: Replays, size: int, step: Callable[[], Tensor]) -> Tensor:
        sizes.append(size)
        return step()

    monkeypatch.setattr(Replays, "run", replayed)
    limits = Limits(1, 64, 96, frozenset({END}), num_speculative_tokens=3)
    spec = SampleSpec(GREEDY, 1, 1, (1, 2), (3,), forbid_stops=False, sequence=(0, 0))
    chunk = Chunk((3, 4, 5, 6), 2, (PageId(0),), (spec,), Phase.DECODE, num_drafts=3)
    verification.verifying(CudaRunner(model, 4, PAGE_SIZE, limits).run)(StepPlan((chunk,)))
    assert sizes == [4]


def keeping_one_more(chunk: Chunk, sampled: Seq[tuple[Tokens, ...]], is_stuck: Seq[bool]) -> Tokens:
    kept = _KEPT(chunk, sampled, is_stuck)
    return tuple(of[0][0] for of in sampled[: len(kept) + 1])


_KEPT = verification._kept


@pytest.mark.long
def test_a_wrong_guess_that_is_kept_would_change_the_kernels_answer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answered(Bench(model), GREEDY)
    monkeypatch.setattr(verification, "_kept", keeping_one_more)
    bench = answered(KernelBench(model, 60, "liar", ids(plain.answers)), GREEDY)
    assert ids(bench.answers) != ids(plain.answers)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gemma4-shared", "deepseek-v3"])
def test_windows_and_latents_are_served_with_guesses_by_kernels(tmp_path: Path, family: str) -> None:
    loaded = loaded_model(write_model(family, tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    plain = Bench(loaded, 60)
    plain.add(0, zoo_prompt(110), params)
    known = ids(plain.run().answers)
    bench = KernelBench(loaded, 60, "mostly_right", known)
    bench.add(0, zoo_prompt(110), params)
    assert ids(bench.run().answers) == known
    assert bench.counts["guesses"] > bench.counts["right"] > 0
