"""A quantized model stays quantized on a GPU, and draws the tokens of its dequantized weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy_runs import greedy_texts
from long_cases import long
from model_zoo import prompt, write_model
from published_formats import published, write_in_mxfp4
from safetensors.torch import load_file, save_file

from pdserve.checkpoint.checkpoint import Checkpoint, ChosenQuantization, choose_quantization, weights_in_form
from pdserve.checkpoint.hf_directory import SINGLE_FILE, open_directory
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.kernels import products
from pdserve.kernels.code_blocks import CodeBlocks
from pdserve.model.decoder import Decoder
from pdserve.model.device_codes import code_blocks, joined_blocks
from pdserve.model.family import Tensors
from pdserve.model.fp8 import Fp8
from pdserve.model.groups import Groups, quantized
from pdserve.model.loading import needed_weights
from pdserve.model.mlp import CompiledExperts
from pdserve.model.ops import Dense, DeviceOps, ExpertStack, Quantized, TorchOps
from pdserve.model.ops_cuda import CudaOps

CPU = torch.device("cpu")
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=96, eos_token_ids=frozenset({0}))
NEAR = {"rtol": 1e-5, "atol": 1e-5}
ASKED = [prompt(5), prompt(21)]


def built(checkpoint: Checkpoint, form: ChosenQuantization, ops: DeviceOps) -> Decoder:
    weights = needed_weights(checkpoint.config, weights_in_form(checkpoint, form))
    return Decoder.build(checkpoint.config, Tensors(weights, torch.float32, CPU), ops)


def texts_on_the_gpu(model: Decoder) -> list[list[int]]:
    return greedy_texts(CudaRunner(model, 20, 16, LIMITS), ASKED, 4)


def texts_in_torch(model: Decoder) -> list[list[int]]:
    return greedy_texts(Runner(model, 20, 16), ASKED, 4)


@pytest.mark.parametrize(
    ("case", "kind", "has_minimums"),
    [
        ("awq", "int4", True),
        *long(
            ("words", "int4", False),
            ("gptq, order of activations", "int4", True),
            ("gptq, 8 bits", "int8", True),
            ("int8", "int8", False),
            ("fp8 of outputs", "fp8", False),
            ("fp8 of large blocks", "fp8", False),
        ),
    ],
)
def test_a_model_of_codes_draws_the_tokens_of_its_weights(
    case: str, kind: str, tmp_path: Path, *, has_minimums: bool
) -> None:
    plain = write_model("llama3", tmp_path / "plain", num_hidden_layers=1, intermediate_size=160)
    published(case, plain, tmp_path / "coded")
    checkpoint = open_directory(tmp_path / "coded")
    form = choose_quantization("auto", checkpoint, "bfloat16", "cuda")
    coded = built(checkpoint, form, CudaOps())
    held = [each for layer in coded.layers for each in layer.matrices()]
    assert {(each.kind, each.minimums is not None) for each in held if isinstance(each, CodeBlocks)} == {
        (kind, has_minimums)
    }
    assert all(isinstance(each, CodeBlocks) for each in held)
    found = texts_on_the_gpu(coded)
    assert found == texts_in_torch(built(checkpoint, "none", TorchOps()))
    assert len({token for text in found for token in text}) > 4


@pytest.mark.long
@pytest.mark.parametrize("case", ["int8", "fp8 of large blocks"])
def test_a_model_of_latents_and_codes_draws_the_tokens_of_its_weights(case: str, tmp_path: Path) -> None:
    plain = write_model("deepseek-v3", tmp_path / "plain", num_hidden_layers=1, kv_lora_rank=56)
    published(case, plain, tmp_path / "coded")
    checkpoint = open_directory(tmp_path / "coded")
    coded = built(checkpoint, choose_quantization("auto", checkpoint, "bfloat16", "cuda"), CudaOps())
    assert any(isinstance(each, CodeBlocks) for each in coded.layers[0].matrices())
    assert texts_on_the_gpu(coded) == texts_in_torch(built(checkpoint, "none", TorchOps()))


@pytest.mark.long
def test_experts_in_mxfp4_stay_as_they_are_and_draw_the_tokens_of_their_weights(tmp_path: Path) -> None:
    checkpoint = open_directory(write_in_mxfp4(tmp_path, num_hidden_layers=2)[1])
    coded = built(checkpoint, choose_quantization("auto", checkpoint, "bfloat16", "cuda"), CudaOps())
    for layer in coded.layers:
        assert isinstance(layer.mlp, CompiledExperts)
        assert isinstance(layer.mlp.experts, ExpertStack)
        for stack in (layer.mlp.experts.gate_up, layer.mlp.experts.down):
            assert isinstance(stack, CodeBlocks)
            assert (stack.kind, stack.minimums) == ("fp4", None)
            assert stack.nbytes == stack.outputs * stack.inputs // 32 * 18
    assert texts_on_the_gpu(coded) == texts_in_torch(built(checkpoint, "none", TorchOps()))


@pytest.mark.long
def test_experts_of_which_one_stack_has_an_extreme_scale_keep_the_other(tmp_path: Path) -> None:
    folder = write_in_mxfp4(tmp_path, num_hidden_layers=2)[1]
    tensors = load_file(folder / SINGLE_FILE)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 100
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    checkpoint = open_directory(folder)
    coded = built(checkpoint, "mxfp4", CudaOps())
    mlp = coded.layers[0].mlp
    assert isinstance(mlp, CompiledExperts)
    assert isinstance(mlp.experts, ExpertStack)
    assert isinstance(mlp.experts.gate_up, CodeBlocks)
    assert isinstance(mlp.experts.down, Dense)
    assert texts_on_the_gpu(coded) == texts_in_torch(built(checkpoint, "none", TorchOps()))


def test_an_embedding_that_a_gpu_holds_as_floats_is_not_rounded(tmp_path: Path) -> None:
    checkpoint = open_directory(write_model("llama3", tmp_path, num_hidden_layers=1))
    floats = checkpoint.weights()
    for device, is_rounded in (("cuda", False), ("cpu", True)):
        weights = weights_in_form(checkpoint, "int8", device)  # type: ignore[arg-type]
        assert isinstance(weights["model.embed_tokens.weight"].read(()), Groups) == is_rounded
        assert isinstance(weights["model.layers.0.mlp.up_proj.weight"].read(()), Groups)
        assert weights.keys() == floats.keys()


@pytest.mark.long
def test_floats_are_rounded_to_codes_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    checkpoint = open_directory(write_model("llama3", tmp_path, num_hidden_layers=1))
    assert choose_quantization("int4", checkpoint, "float16", "cuda") == "int4"
    assert texts_on_the_gpu(built(checkpoint, "int4", CudaOps())) == texts_in_torch(
        built(checkpoint, "int4", TorchOps())
    )


def test_inputs_of_8_bits_are_taken_where_they_are_asked_for_and_there() -> None:
    whole = in_groups(16, 64, 8)
    with_minimums = replace(whole, minimums=whole.minimums + np.float16(0.5))
    x = torch.randn((2, 64), generator=torch.Generator().manual_seed(2))
    held = code_blocks(whole, CPU)
    assert not torch.equal(products.product(x, held, rounded=True), products.product(x, held))
    for input_bits in (8, 16):
        for weight in (whole, with_minimums):
            ops, is_rounded = CudaOps(input_bits), input_bits == 8 and weight is whole
            expected = products.product(x, code_blocks(weight, CPU), rounded=is_rounded)
            held = ops.held(Quantized(weight, torch.float32))
            assert torch.equal(ops.linear(x, held), expected)
            assert torch.equal(ops.linear_add(x, held, torch.zeros(2, 16)), expected)


def test_groups_in_an_order_are_joined_if_it_is_the_same() -> None:
    first, second = np.random.default_rng(1).permutation(64), np.random.default_rng(2).permutation(64)
    gate, up = (replace(in_groups(8, 64, seed=seed), order=first) for seed in (1, 2))
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(1))
    for other in (up, replace(up, order=second), replace(up, order=None)):
        held = CudaOps().held_gate_up(Quantized(gate, torch.float32), Quantized(other, torch.float32))
        assert isinstance(held, CodeBlocks if other is up else Dense)
        expected = x.double() @ torch.cat((wide(gate), wide(other))).t()
        torch.testing.assert_close(CudaOps().linear(x, held).double(), expected, **NEAR)
    assert (gate.values()[:, first] == replace(gate, order=None).values()).all()


@pytest.mark.parametrize("inputs", [100, 128, 300])
def test_fp8_is_held_with_scales_of_segments_or_one_of_each_output(inputs: int) -> None:
    draw = np.random.default_rng(inputs)
    codes = draw.integers(0, 127, (24, inputs), np.uint8)
    segments = draw.random((24, -(-inputs // 128)), np.float32)
    x = torch.randn((3, inputs), generator=torch.Generator().manual_seed(inputs))
    for scales in (segments, segments[:, :1], np.repeat(segments[:, :1], segments.shape[1], 1)):
        matrix = Fp8(codes, scales)
        held = code_blocks(matrix, CPU)
        assert held.group == (128 if scales is segments and inputs > 128 else inputs)
        expected = x.double() @ torch.from_numpy(matrix.values()).double().t()
        torch.testing.assert_close(products.product(x, held).double(), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("case", ["int8", "fp8 of large blocks"])
def test_an_mlp_with_inputs_of_8_bits_makes_nearly_what_it_makes_with_others(case: str, tmp_path: Path) -> None:
    published(case, write_model("llama3", tmp_path / "plain", num_hidden_layers=1), tmp_path / "coded")
    checkpoint = open_directory(tmp_path / "coded")
    form = choose_quantization("auto", checkpoint, "bfloat16", "cuda")
    x = torch.randn((5, checkpoint.config.hidden_size), generator=torch.Generator().manual_seed(1))
    models = [built(checkpoint, form, CudaOps(bits)) for bits in (8, 16)]
    rounded, exact = (model.layers[0].mlp.forward(model.ops, x, None) for model in models)
    assert 1e-3 < float((rounded - exact).norm() / exact.norm()) < 0.1


def wide(groups: Groups) -> torch.Tensor:
    return torch.from_numpy(groups.values()).double()


def in_groups(outputs: int, inputs: int, bits: int = 4, seed: int = 0) -> Groups:
    return quantized(np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32), bits)


def test_a_scale_that_several_groups_share_is_held_once() -> None:
    groups, x = in_groups(8, 512), torch.randn((3, 512), generator=torch.Generator().manual_seed(3))
    for times, expected in ((16, 512), (8, 128), (4, 128), (2, 64), (1, 32)):
        shared = np.repeat(groups.scales[:, ::times], times, 1)
        same = replace(groups, scales=shared, minimums=np.float16(-8) * shared)
        held = code_blocks(same, CPU)
        assert (held.group, held.minimums) == (expected, None)
        torch.testing.assert_close(products.product(x, held).double(), x.double() @ wide(same).t(), **NEAR)
        moved = replace(same, minimums=same.minimums + np.float16(0.5))
        held = code_blocks(moved, CPU)
        assert held.group == expected
        torch.testing.assert_close(products.product(x, held).double(), x.double() @ wide(moved).t(), **NEAR)


def test_experts_whose_scales_differ_in_form_are_held_in_the_finer_one() -> None:
    fine = in_groups(8, 128)
    shared = np.repeat(fine.scales[:, :1], 4, 1)
    coarse = replace(fine, scales=shared, minimums=np.float16(-8) * shared)
    moved = replace(coarse, minimums=coarse.minimums + np.float16(0.25))
    experts = [code_blocks(each, CPU, torch.ones(8)) for each in (coarse, moved, fine)]
    assert [each.group for each in experts] == [128, 128, 32]
    joined = joined_blocks(experts)
    assert (joined.group, joined.outputs) == (32, 24)
    expected = torch.cat([wide(each) for each in (coarse, moved, fine)]).t() + 1
    torch.testing.assert_close(products.product(torch.eye(128), joined).double(), expected, **NEAR)


def test_experts_of_which_some_have_no_codes_are_refused() -> None:
    coded = code_blocks(in_groups(8, 64), CPU)
    for other in (Dense(torch.ones(8, 64)), code_blocks(in_groups(8, 64, 8), CPU)):
        with pytest.raises(ValueError, match="some have codes, and some have none, or others; --quantization none"):
            joined_blocks([coded, other])


def test_a_gate_of_codes_and_an_up_of_floats_are_joined_as_floats() -> None:
    gate, up = Quantized(in_groups(8, 64), torch.float32), Dense(torch.ones(8, 64))
    held = CudaOps().held_gate_up(gate, up)
    assert isinstance(held, Dense)
    assert torch.equal(held.data, torch.cat((gate.dense().data, up.data)))
