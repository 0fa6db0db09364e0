"""Layers with a state over the kernels of GPUs, interpreted: the tokens of transformers, whatever becomes of pages."""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_states import ALONE
from greedy_runs import greedy_texts, spec
from guessing_bench import Bench, assert_same, ids
from kernel_bench import GREEDY, KernelBench, answered
from launch_grids import Grids
from loaded_models import loaded_model
from long_cases import long, long_but
from model_zoo import STATES, first_disagreement, load_oracle, prompt, write_model
from spoilt_pages import LIMITS, Engine
from torch import Tensor
from whole_triton import triton_attention

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine import states_triton
from pdserve.engine.gpu_memory import step_bytes
from pdserve.engine.layer_kinds import paging_of, pool_size
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.scheduler import Limits
from pdserve.engine.states_triton import TritonStates, states_spec
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.kernels.device import state_blocks
from pdserve.kernels.states import BLOCK, MAX_BLOCKED_KEY_DIM, MIN_BLOCKED, StatesSpec
from pdserve.model.decoder import Decoder
from pdserve.model.family import Tensors
from pdserve.model.layer_groups import LayerGroup, layer_groups
from pdserve.model.ops_cuda import CudaOps

CONVOLVED = ("lfm2", "lfm2-moe")
WITH_HEADS = tuple(each for each in STATES if each not in CONVOLVED)
IN_EACH_RUN = (("lfm2", MIN_BLOCKED),)  # test_state_blocks has the others


of_families = pytest.mark.parametrize("family", long_but(("qwen3-next",), STATES))


@pytest.mark.parametrize(
    ("family", "min_blocked"),
    long_but(
        IN_EACH_RUN, [*itertools.product(WITH_HEADS, (8, MIN_BLOCKED)), *((each, MIN_BLOCKED) for each in CONVOLVED)]
    ),
)
def test_tokens_are_those_of_transformers_from_one_launched_step_to_the_next(
    family: str, min_blocked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks beside sequences that decode; in few pages they are preempted, in more found again.

    Chunks of 8 tokens and more are computed in blocks, or all of them token by token.
    """
    monkeypatch.setattr(states_triton, "StatesSpec", partial(StatesSpec, min_blocked=min_blocked))
    folder = write_model(family, tmp_path, **ALONE[family])
    model, oracle = loaded_model(folder), load_oracle(folder)
    paging = paging_of(layer_groups(model.config, 16, powers_of_two=True))
    span = paging.span
    shared = prompt(span + 2)
    few = [prompt(span - 1, 3), prompt(7), [*shared, *prompt(span - 4, 1)]]
    engine = Engine(CudaRunner(model, paging.num_pages(span) * 2 + 1, 16, LIMITS))
    engine.generate(few, 4)
    assert engine.scheduler.num_preemptions > 0
    again = Engine(CudaRunner(model, 10, 16, LIMITS))
    more = [[*shared, *prompt(9, 2)], [*shared, *prompt(20, 4)], prompt(3)]
    again.generate(more[:1], 1)
    found, _ = again.generate(more[1:], 2)
    assert found.num_cached_tokens == span
    for prompts, tokens in ((few, engine.tokens), (more, again.tokens)):
        for number, token_ids in enumerate(prompts):
            assert first_disagreement(oracle, token_ids, tokens[number]) is None


@pytest.mark.long
@pytest.mark.parametrize("family", WITH_HEADS)
def test_long_prompts_are_computed_in_full_blocks_and_give_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is cut within a block, and goes on from there."""
    folder = write_model(family, tmp_path, **ALONE[family])
    limits = replace(LIMITS, max_num_batched_tokens=400)
    prompts = [prompt(150), prompt(70, 3), prompt(9)]
    grids = Grids.of(monkeypatch, state_blocks, "within_blocks")
    for chunk_tokens in (100, 400):
        runner = CudaRunner(loaded_model(folder), 20, 64, limits)
        found = greedy_texts(runner, prompts, 5, chunk_tokens)
        for token_ids, answer in zip(prompts, found, strict=True):
            assert first_disagreement(load_oracle(folder), token_ids, answer) is None
    assert max(num_blocks for num_blocks, _ in grids.seen) >= 4


@pytest.mark.parametrize("family", [*long("falcon-h1"), "lfm2"])
def test_a_launch_that_fails_behind_its_layers_advances_no_state(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(family, tmp_path, **ALONE[family])
    runner = CudaRunner(loaded_model(folder), 10, 16, LIMITS)
    expected = greedy_texts(runner, [prompt(9), prompt(5)], 2)
    sample, count = KernelSampler.sample, itertools.count()

    def failing(self: KernelSampler, *given: Any) -> Tensor:  # noqa: ANN401 - whatever it takes
        if next(count) % 2 == 0:
            raise RuntimeError("sampling failed")
        return sample(self, *given)

    monkeypatch.setattr(KernelSampler, "sample", failing)
    assert greedy_texts(Twice(runner), [prompt(9), prompt(5)], 2) == expected


@dataclass
class Twice:
    """Runs each step again that fails."""

    runner: CudaRunner

    @property
    def kv(self) -> Tensor:
        return self.runner.kv

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self.runner.groups

    def run(self, plan: StepPlan) -> StepResult:
        with pytest.raises(RuntimeError, match="sampling failed"):
            self.runner.run(plan)
        return self.runner.run(plan)


@pytest.mark.long
def test_a_state_that_is_not_kept_on_a_gpu_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model("lfm2", tmp_path)
    monkeypatch.setattr(TritonStates, "commit", lambda *_: None)
    (answer,) = greedy_texts(CudaRunner(loaded_model(folder), 10, 16, LIMITS), [prompt(9)], 6)
    assert first_disagreement(load_oracle(folder), prompt(9), answer) is not None


@pytest.mark.parametrize("family", long_but(("lfm2",), STATES))
def test_kernels_verify_guesses_beside_states(family: str, tmp_path: Path) -> None:
    model, params = loaded_model(write_model(family, tmp_path, **ALONE[family])), replace(GREEDY, max_tokens=16)
    plain = answered(Bench(model, 60), params)
    bench = answered(KernelBench(model, 60, "mostly_right", ids(plain.answers)), params)
    assert_same(bench, plain, close=4e-5)  # a CPU with AMX sums in another order
    assert bench.counts["guesses"] > bench.counts["right"] > 5
    assert bench.counts["steps"] < plain.counts["steps"]


@of_families
@torch.inference_mode()
def test_in_bfloat16_logits_over_kernels_are_as_near_as_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Of a prompt, and of a token behind the state that it leaves, which is float32."""
    folder = write_model(family, tmp_path, **ALONE[family])
    config = open_directory(folder).config
    weights = Tensors(open_directory(folder).weights(), torch.bfloat16, torch.device("cpu"))
    model, oracle, text = Decoder.build(config, weights, CudaOps()), load_oracle(folder), prompt(21)
    groups = layer_groups(config, 16, powers_of_two=True)
    kv = torch.zeros(pool_size(config, 8, groups, config.head_dim), dtype=torch.bfloat16)
    found = []
    for first, part in ((0, text[:-1]), (len(text) - 1, text[-1:])):
        chunk = Chunk(part, first, (PageId(0), PageId(1)), (spec(),), other_pages=((PageId(2), PageId(3)),))
        token_ids, attention = triton_attention(model, kv, StepPlan((chunk,)), (64, (1, 2)), 0, groups)
        found.append(model.forward(token_ids, attention, None))
        assert attention.states is not None
        attention.states.commit()
    exact = oracle(torch.tensor([text])).logits[0]
    theirs = oracle.bfloat16()(torch.tensor([text])).logits[0].float()
    assert (torch.cat(found).float() - exact).square().mean().sqrt() < 1.5 * (theirs - exact).square().mean().sqrt()


def test_a_gpu_has_room_for_what_the_largest_step_keeps_beside_states(tmp_path: Path) -> None:
    folder = write_model("falcon-h1", tmp_path)
    model = loaded_model(folder)
    (each,) = set(model.config.design.recurrent)
    assert each is not None
    num_layers, limits = model.config.num_layers, Limits(4, 100, 500, frozenset())
    runner = CudaRunner(model, 10, 16, limits)
    states = runner._attention.states
    assert isinstance(states, TritonStates)
    kept = [tensor for tensor in vars(states._paged).values() if isinstance(tensor, Tensor)]
    beside = sum(tensor.nbytes for tensor in kept if tensor.untyped_storage().data_ptr() != runner.kv.data_ptr())
    assert beside >= 4 * 100 * (num_layers * each.sizes.changes + BLOCK * each.sizes.products)
    assert states_spec(model.config, runner.groups[0].page_size, (100, 4)).kept_bytes == beside
    larger = replace(limits, max_num_batched_tokens=101)
    more = step_bytes(model, larger) - step_bytes(model, limits)
    assert more >= model.activation_bytes() + 4 * num_layers * each.sizes.changes


def test_keys_of_too_many_features_are_never_computed_in_blocks(tmp_path: Path) -> None:
    for width, products in ((MAX_BLOCKED_KEY_DIM, 6), (MAX_BLOCKED_KEY_DIM + 1, 0)):
        folder = write_model("falcon-h1", tmp_path / str(width), mamba_d_state=width)
        config = open_directory(folder).config
        assert states_spec(config, 64, (100, 4)).products == products
