"""The kernels' runner verifies guesses, and samples what the CPU's engine samples without any."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from guessing_bench import END, LOOKUP, PAGE_SIZE, REPEATED, VOCAB, Bench, Name, assert_same_scores, ids
from listed_answers import Listed
from model_zoo import prompt as zoo_prompt
from model_zoo import write_model
from small_models import small_config, small_model
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine import verification
from pdserve.engine.replays import Replays
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, StepResult, Tokens
from pdserve.executor.local import LocalExecutor
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.protocol.sampling import SamplingParams

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=1)
PENALIZED = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, repetition_penalty=1.1)
LISTED = {(20, 21, 22, 23, 24, 25, 60, END), (20, 21, 22, 23, 30, 31, 32, 61, END)}


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(small_config(VOCAB, eos_token_id=END, num_key_value_heads=1, **SIZES))


@dataclass
class KernelBench(Bench):
    """Requests that the kernels' runner answers, behind a worker's executor."""

    def __post_init__(self) -> None:
        self.lookup = replace(LOOKUP, with_penalties=False)
        super().__post_init__()
        kernels = CudaRunner(self.model, self.num_pages, PAGE_SIZE, self.scheduler.limits)
        assert kernels.groups == self.runner.groups
        self.executor = LocalExecutor(kernels, ThreadPoolExecutor(1))
        self._run = lambda plan: self.executor.start(plan).result()

    def compute(self, plan: StepPlan) -> StepResult:
        self.counts["guesses with penalties"] += sum(
            chunk.num_drafts for chunk in plan.chunks for spec in chunk.samples if spec.params.has_penalties
        )
        return super().compute(plan)

    def run(self) -> "Bench":
        try:
            return super().run()
        finally:
            self.executor.close()


def answered(bench: Bench, *asked: SamplingParams, matcher: Listed | None = None) -> Bench:
    """Answer requests, the last of which has a grammar if there is a matcher."""
    for number, params in enumerate(asked):
        is_last = number == len(asked) - 1
        bench.add(number, [*REPEATED, 14 + number], params, matcher if is_last else None)
    return bench.run()


def assert_same(bench: Bench, plain: Bench) -> None:
    assert ids(bench.answers) == ids(plain.answers)
    assert bench.ends == plain.ends
    assert_same_scores(bench.answers, plain.answers)


def test_kernels_sample_with_right_and_wrong_guesses_what_a_cpu_samples_without(model: Model) -> None:
    asked = (
        GREEDY,
        SamplingParams(seed=3, temperature=0.8, top_k=9, n=2, max_tokens=10, min_tokens=4, logprobs=0),
        SamplingParams(seed=4, max_tokens=9, ignore_eos=True, bad_word_ids=((9, 10), (33,)), logit_bias=((12, 4.0),)),
        PENALIZED,
        SamplingParams(seed=5, temperature=2.0),
    )
    plain = answered(Bench(model), *asked, matcher=Listed(LISTED, VOCAB))
    known = {name: answer for name, answer in ids(plain.answers).items() if name[0] != asked.index(PENALIZED)}
    bench = answered(KernelBench(model, 60, "mostly_right", known), *asked, matcher=Listed(LISTED, VOCAB))
    assert_same(bench, plain)
    assert tuple(ids(plain.answers)[4, 0]) in LISTED
    assert bench.counts["guesses"] > bench.counts["right"] > 12
    assert bench.counts["steps"] < plain.counts["steps"]
    assert bench.counts["guesses with penalties"] == 0


def test_kernels_take_fewer_steps_where_a_text_repeats_but_those_with_penalties_get_no_guesses(model: Model) -> None:
    often = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logit_bias=((REPEATED[0], 100.0),))
    for params, saved in ((often, 8), (replace(often, repetition_penalty=1.1), 0)):
        plain, bench = (answered(each, params) for each in (Bench(model), KernelBench(model, 60, "ngram")))
        assert_same(bench, plain)
        assert plain.counts["steps"] - bench.counts["steps"] >= saved
        assert bool(bench.counts["guesses"]) == bool(saved)


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


def test_a_wrong_guess_that_is_kept_would_change_the_kernels_answer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answered(Bench(model), GREEDY)
    monkeypatch.setattr(verification, "_kept", keeping_one_more)
    bench = answered(KernelBench(model, 60, "liar", ids(plain.answers)), GREEDY)
    assert ids(bench.answers) != ids(plain.answers)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "deepseek-v3"])
def test_windows_and_latents_are_served_with_guesses_by_kernels(tmp_path: Path, family: str) -> None:
    checkpoint = open_directory(write_model(family, tmp_path))
    loaded = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    plain = Bench(loaded, 60)
    plain.add(0, zoo_prompt(110), params)
    known = ids(plain.run().answers)
    bench = KernelBench(loaded, 60, "mostly_right", known)
    bench.add(0, zoo_prompt(110), params)
    assert ids(bench.run().answers) == known
    assert bench.counts["guesses"] > bench.counts["right"] > 0
