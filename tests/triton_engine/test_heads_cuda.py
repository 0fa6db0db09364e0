"""Heads on the kernels' runner: they change no token, and guess what they guess on a CPU."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from guessing_bench import REPEATED, Bench, assert_same, ids
from kernel_bench import (
    GREEDY,
    PENALIZED,
    KernelBench,
    answered,
    answered_mixed,
    assert_same_drafts,
    assert_same_kv,
    one_layer,
)
from knowing_heads import Knowing
from made_heads import made_head, with_room
from model_zoo import prompt as zoo_prompt
from model_zoo import write_model
from mtp_modules import SMALL, SMALL_WITH_STATES, write_model_with_module

from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine import verification
from pdserve.engine.head_cuda import CudaHead
from pdserve.engine.sequence import Sequence
from pdserve.executor.head_files import open_mtp
from pdserve.model.decoder import Decoder
from pdserve.model.eagle3 import Eagle3Head
from pdserve.model.family import Model, Tensors
from pdserve.model.guessing_head import Head
from pdserve.model.layer_groups import LayerGroup
from pdserve.model.loading import needed_weights, ops_for
from pdserve.model.mtp import MtpHead
from pdserve.model.ops import DeviceOps, TorchOps
from pdserve.model.ops_cuda import CudaOps
from pdserve.protocol.sampling import SamplingParams

MODULES = {**SMALL, **SMALL_WITH_STATES}


@pytest.fixture(scope="module")
def model() -> Model:
    return with_room(one_layer(num_hidden_layers=2))


@pytest.fixture(scope="module")
def head(model: Model) -> Eagle3Head:
    return made_head(model, ops_for(model.device, 16))


@pytest.mark.long
def test_a_head_on_kernels_guesses_what_it_guesses_on_a_cpu_and_changes_no_token(
    model: Model, head: Eagle3Head
) -> None:
    plain, on_cpu = answered_mixed(Bench(model)), answered_mixed(Bench(model, 60, head=head))
    bench = answered_mixed(KernelBench(model, 60, head=head))
    assert_same(bench, plain)
    assert_same_drafts(bench, on_cpu)
    assert len(bench.drafted) > 20
    assert not bench.counts["draft failures"]


@pytest.mark.long
def test_a_head_on_kernels_takes_in_prefixes_preempted_texts_and_parts_of_prompts(
    model: Model, head: Eagle3Head
) -> None:
    def run(bench: Bench) -> Bench:
        for number in range(3):  # a prompt takes two steps, and begins as the one before
            bench.add(number, [*range(10, 80), 20 + number], replace(GREEDY, max_tokens=12))
        return bench.run()

    plain, on_cpu, bench = (
        run(each) for each in (Bench(model), Bench(model, 12, head=head), KernelBench(model, 12, head=head))
    )
    assert_same(bench, plain)
    assert bench.scheduler.num_preemptions > 0
    assert max(each.num_cached_tokens for each, _, _ in bench.drafted) >= 64
    assert_same_drafts(bench, on_cpu)


class DraftingSeldom(Bench):
    """Guesses behind each fourth step that decodes; others are planned while the one before runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ask, self.num_asked = self.scheduler.speculation.ask_for_drafts, 0

        def ask_seldom(decoding: Seq[Sequence], counts: Mapping[Sequence, int], room: int) -> None:
            self.num_asked += bool(decoding)
            ask(decoding, counts, room if self.num_asked % 4 == 0 else 0)

        self.scheduler.speculation.ask_for_drafts = ask_seldom  # type: ignore[method-assign]


class DraftingSeldomOnKernels(DraftingSeldom, KernelBench):
    pass


@pytest.mark.long
def test_a_head_takes_in_steps_that_are_launched_while_others_run(model: Model, head: Eagle3Head) -> None:
    asked = replace(GREEDY, max_tokens=18), replace(PENALIZED, max_tokens=16)
    plain, on_cpu, bench = (
        answered(each, *asked, prompt=REPEATED[:2])
        for each in (Bench(model), DraftingSeldom(model, 60, head=head), DraftingSeldomOnKernels(model, 60, head=head))
    )
    assert_same(bench, plain)
    assert_same_drafts(bench, on_cpu)
    assert_same_kv(bench, on_cpu)
    assert bench.counts["ahead"] > 8
    assert len({len(known) for _, known, _ in bench.drafted}) == 4


@pytest.mark.long
def test_right_guesses_of_a_head_save_steps_of_kernels(model: Model, head: Eagle3Head) -> None:
    asked = replace(GREEDY, max_tokens=24), replace(PENALIZED, max_tokens=24)
    plain = answered(Bench(model), *asked)
    make = type("Made", (Knowing,), {"known": plain.answers})
    bench = answered(KernelBench(model, 60, head=head, head_drafter=make), *asked)
    assert_same(bench, plain)
    assert bench.counts["right"] > 0.9 * bench.counts["guesses"] > 20
    assert bench.counts["steps"] < 0.8 * plain.counts["steps"]


@pytest.mark.long
def test_an_answer_stops_within_a_chain_of_a_heads_guesses_on_kernels(model: Model, head: Eagle3Head) -> None:
    whole = answered(Bench(model), replace(GREEDY, max_tokens=30))
    answer = ids(whole.answers)[0, 0]
    place = next(place for place in range(12, len(answer)) if answer[place] not in answer[:place])
    params = replace(GREEDY, max_tokens=30, stop_token_ids=(answer[place],), ignore_eos=False)
    make = type("Made", (Knowing,), {"known": whole.answers})
    plain, bench = (
        answered(each, params) for each in (Bench(model), KernelBench(model, 60, head=head, head_drafter=make))
    )
    assert_same(bench, plain)
    num_tokens = len(plain.answers[0, 0])
    assert num_tokens < 30
    assert 1 + bench.counts["steps"] + bench.counts["right"] > num_tokens, "guesses behind it were right"


@pytest.mark.long
def test_a_wrong_guess_of_a_head_that_is_kept_would_change_the_kernels_answer(
    model: Model, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = partial(answered, prompt=REPEATED[:2])
    plain, kept = short(Bench(model), GREEDY), verification._kept
    monkeypatch.setattr(
        verification,
        "_kept",
        lambda chunk, sampled, stuck: tuple(of[0][0] for of in sampled[: len(kept(chunk, sampled, stuck)) + 1]),
    )
    assert ids(short(KernelBench(model, 60, head=head), GREEDY).answers) != ids(plain.answers)


def test_a_head_that_fails_to_take_in_ends_no_step_and_is_counted(
    model: Model, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, prompt = replace(GREEDY, max_tokens=6), REPEATED[:2]
    plain, bench = answered(Bench(model), params, prompt=prompt), KernelBench(model, 60, head=head)
    taken, num_taken = CudaHead.take_in, 0

    def failing(*step: object) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 3:
            raise MemoryError("once")
        taken(*step)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaHead, "take_in", failing)
    assert_same(answered(bench, params, prompt=prompt), plain)
    assert bench.counts["draft failures"] == 1 < num_taken


def test_failures_to_take_in_are_told_where_all_steps_are_launched(
    model: Model, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_step: object) -> None:
        raise MemoryError("each time")

    monkeypatch.setattr(CudaHead, "take_in", fail)
    bench = KernelBench(model, 60, head=head)
    answered(bench, replace(GREEDY, max_tokens=1), prompt=REPEATED[:2])
    assert bench.counts["guesses"] == 0 < bench.counts["draft failures"]


FEW = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
WINDOWS = {**FEW, "num_hidden_layers": 3, "sliding_window": 24}  # more layers with windows than others


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of padding, whose results nobody reads
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((each, FEW) for each in ("llama3", "qwen2", "qwen3", "qwen3-moe")),
        *((each, WINDOWS) for each in ("gemma2", "gpt-oss")),
    ],
)
def test_a_head_on_kernels_guesses_beside_each_family_what_it_guesses_on_a_cpu(
    tmp_path: Path, family: str, shape: dict[str, int]
) -> None:
    checkpoint = open_directory(write_model(family, tmp_path, **shape))
    plain, kernels = (loaded(checkpoint, ops) for ops in (TorchOps(), CudaOps()))
    groups = assert_guesses_of_a_cpu((plain, kernels), (made_head(plain, TorchOps()), made_head(kernels, CudaOps())))
    assert len(groups) == (2 if shape is WINDOWS else 1), "as published models have"


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.long
@pytest.mark.parametrize("family", MODULES)
def test_a_module_on_kernels_guesses_what_it_guesses_on_a_cpu(tmp_path: Path, family: str) -> None:
    checkpoint = open_directory(write_model_with_module(family, tmp_path, **MODULES[family]))
    models, heads, module = list[Model](), list[Head](), open_mtp(checkpoint)
    for ops in (TorchOps(), CudaOps()):
        model = loaded(checkpoint, ops)
        assert model.embedding is not None
        assert model.lm_head is not None
        tensors = Tensors(module.held("none"), torch.float32, model.device)
        models.append(model)
        heads.append(MtpHead.build(model.config, tensors, ops, (model.embedding, model.lm_head)))
    assert_guesses_of_a_cpu(models, heads)


def loaded(checkpoint: Checkpoint, ops: DeviceOps) -> Model:
    weights = needed_weights(checkpoint.config, checkpoint.weights())
    return with_room(Decoder.build(checkpoint.config, Tensors(weights, torch.float32, torch.device("cpu")), ops))


def assert_guesses_of_a_cpu(models: Seq[Model], heads: Seq[Head]) -> Seq[LayerGroup]:
    """Check what a head guesses on kernels, behind prompts in parts and beyond windows; return the groups of layers.

    All are for a CPU first.
    """
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain, on_cpu = Bench(models[0], 60), Bench(models[0], 60, head=heads[0])
    on_kernels = KernelBench(models[1], 60, head=heads[1])
    for bench in (plain, on_cpu, on_kernels):
        for number, length in enumerate((70, 5)):
            bench.add(number, zoo_prompt(length, seed=number), params)
        bench.run()
    assert ids(on_kernels.answers) == ids(plain.answers)
    assert_same_drafts(on_kernels, on_cpu)
    assert_same_kv(on_kernels, on_cpu)
    assert sum(len(guesses) for _, _, guesses in on_kernels.drafted) > 8
    assert not on_kernels.counts["draft failures"]
    return on_kernels.kernels.groups
