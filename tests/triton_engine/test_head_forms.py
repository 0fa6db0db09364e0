"""A head on kernels is right beside a model in halves or in codes, if what it guesses is what the model samples."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle3_heads import (
    head_config,
    longest_walks,
    random_head,
    write_forgetful_model,
    write_head,
    write_head_that_looks_back,
)
from engine_answers import GREEDY, written
from guessing_bench import Bench
from kernel_bench import KernelBench
from made_heads import with_room
from model_zoo import prompt, write_model
from mtp_modules import SMALL, write_model_with_module
from published_formats import published
from torch import Tensor

from pdserve.checkpoint.checkpoint import Checkpoint, ChosenQuantization, choose_quantization, weights_in_form
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.executor.form import DTYPES
from pdserve.executor.head_files import HeadFiles, MtpFiles, open_head, open_mtp
from pdserve.kernels.code_blocks import CodeBlocks
from pdserve.model.decoder import Decoder
from pdserve.model.eagle3 import Eagle3Head
from pdserve.model.family import Model, Tensors
from pdserve.model.guessing_head import Head
from pdserve.model.loading import load_model, needed_weights
from pdserve.model.mtp import MtpHead
from pdserve.model.ops_cuda import CudaOps
from pdserve.protocol.sampling import SamplingParams

CPU = torch.device("cpu")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # of padding, whose results nobody reads
@pytest.mark.parametrize(
    ("dtype", "form"),
    [("bfloat16", "none"), ("float16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "int8")],
)
def test_a_head_on_kernels_is_right_in_halves_and_codes(tmp_path: Path, dtype: str, form: ChosenQuantization) -> None:
    tensors, folder = write_forgetful_model(tmp_path / "model"), tmp_path / "model"
    files = open_head(write_head_that_looks_back(tmp_path / "head", folder, tensors), open_directory(folder).config)
    model = on_kernels(open_directory(folder), dtype, form)
    head = head_on_kernels(files, model, form)
    for each in (model.layers[0].attention, head.attention):
        assert all(isinstance(matrix, CodeBlocks) == (form != "none") for matrix in each.matrices())

    def answer(bench: Bench, asked: list[int]) -> list[int]:
        bench.add(0, asked, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        bench.run()
        return [token.token_id for token in bench.answers[0, 0]]

    first = longest_walks(tensors, 1)[0][0]
    plain, bench = answer(KernelBench(model, 20), [first]), KernelBench(model, 20, head=head)
    assert answer(bench, [first, *plain, first]) == plain
    assert bench.counts["right"] == bench.counts["guesses"] > 5
    assert not bench.counts["draft failures"]


def test_a_worker_in_the_interpreter_writes_in_its_default_type_what_a_cpu_writes(tmp_path: Path) -> None:
    model, params = write_model("llama3", tmp_path, num_hidden_layers=1), replace(GREEDY, max_tokens=4)
    tokens = written(model, params, dtype="bfloat16")
    assert written(model, params, dtype="auto", device="interpreter") == tokens


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("file", ["fp8 of large blocks", "awq"])
def test_a_head_on_kernels_guesses_beside_codes_of_a_file_nearly_what_it_guesses_on_a_cpu(
    tmp_path: Path, file: str
) -> None:
    plain = write_model("llama3", tmp_path / "plain", num_attention_heads=2)
    published(file, plain, tmp_path / "coded")
    checkpoint, raw = open_directory(tmp_path / "coded"), json.loads((plain / "config.json").read_text())
    form, config = choose_quantization("auto", checkpoint, "bfloat16", "cuda"), head_config(raw, 200, (0, 1, 2))
    assert form != "none"
    files = open_head(write_head(tmp_path / "head", config, random_head(config)), checkpoint.config)
    on_cpu, model = cpu_model(checkpoint, "bfloat16", form), on_kernels(checkpoint, "bfloat16", form)
    assert_nearly_same((on_cpu, files.load(on_cpu, form)), (model, head_on_kernels(files, model, form)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize(("dtype", "form"), [("float16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")])
def test_a_module_on_kernels_guesses_in_halves_and_codes_nearly_what_it_guesses_on_a_cpu(
    tmp_path: Path, dtype: str, form: ChosenQuantization
) -> None:
    checkpoint = open_directory(write_model_with_module("deepseek-v3", tmp_path, **SMALL["deepseek-v3"]))
    module, on_cpu = open_mtp(checkpoint), cpu_model(checkpoint, dtype, form)
    model = on_kernels(checkpoint, dtype, form)
    assert_nearly_same((on_cpu, module.load(on_cpu, form)), (model, module_on_kernels(module, model, form)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("family", SMALL)
def test_a_module_on_kernels_in_bfloat16_scores_as_nearly_right_as_on_a_cpu(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, scores = open_directory(write_model_with_module(family, tmp_path, **SMALL[family])), list[Tensor]()
    module, scored = open_mtp(checkpoint), MtpHead.logits

    def logits(head: MtpHead, hidden: Tensor) -> Tensor:
        scores.append(scored(head, hidden))
        return scores[-1]

    def first_scores(bench: Bench) -> Tensor:
        scores.clear()
        bench.add(0, prompt(33), replace(GREEDY, max_tokens=6))
        bench.run()
        assert not bench.counts["draft failures"]
        return scores[0][0].float()

    monkeypatch.setattr(MtpHead, "logits", logits)
    exact, on_cpu = (
        first_scores(Bench(model, 20, head=module.load(model)))
        for model in (cpu_model(checkpoint, dtype, "none") for dtype in ("float32", "bfloat16"))
    )
    model = on_kernels(checkpoint, "bfloat16", "none")
    found = first_scores(KernelBench(model, 20, head=module_on_kernels(module, model, "none")))
    assert (found - exact).abs().mean() < 2 * (on_cpu - exact).abs().mean()


def cpu_model(checkpoint: Checkpoint, dtype: str, form: ChosenQuantization) -> Model:
    return with_room(load_model(checkpoint.config, weights_in_form(checkpoint, form), DTYPES[dtype]))


def on_kernels(checkpoint: Checkpoint, dtype: str, form: ChosenQuantization) -> Decoder:
    weights = needed_weights(checkpoint.config, weights_in_form(checkpoint, form, "cuda"))
    made = with_room(Decoder.build(checkpoint.config, Tensors(weights, DTYPES[dtype], CPU), CudaOps()))
    assert isinstance(made, Decoder)
    return made


def head_on_kernels(files: HeadFiles, model: Model, form: ChosenQuantization) -> Eagle3Head:
    own = Tensors(files.held(form), model.dtype, CPU)
    return Eagle3Head.build(files.config, own, CudaOps(), files.token_ids, model.embedding)


def module_on_kernels(module: MtpFiles, model: Decoder, form: ChosenQuantization) -> MtpHead:
    assert model.embedding is not None
    assert model.lm_head is not None
    own = Tensors(module.held(form), model.dtype, CPU)
    return MtpHead.build(model.config, own, CudaOps(), (model.embedding, model.lm_head))


def assert_nearly_same(on_cpu: tuple[Model, Head], kernels: tuple[Model, Head]) -> None:
    """Check first guesses behind texts that both have. A tie may fall to another token, and texts differ from there."""
    benches = Bench(on_cpu[0], 40, head=on_cpu[1]), KernelBench(kernels[0], 40, head=kernels[1])
    for bench in benches:
        for number, length in enumerate((30, 5)):
            bench.add(number, prompt(length, seed=number), replace(GREEDY, max_tokens=8))
        bench.run()
    theirs, ours = ({tuple(known): guesses for _, known, guesses in each.drafted} for each in benches)
    first = [(ours[known][:1], theirs[known][:1]) for known in ours.keys() & theirs.keys()]
    assert sum(one == other for one, other in first) > 0.7 * len(first) > 1
    assert not benches[1].counts["draft failures"]
