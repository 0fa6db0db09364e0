"""Experts that a checkpoint holds in a few tensors are read one by one, as matrices of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from greedy_runs import greedy_texts
from held_weights import held
from model_zoo import first_disagreement, load_oracle, prompt
from mtp_modules import write_model_with_module
from published_formats import write_in_mxfp4
from safetensors.torch import load_file
from thread_ranks import thread_ranks
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.runner import Runner
from pdserve.executor.form import weight_bytes as estimated_bytes
from pdserve.kernels.cpu.layers import Tiles
from pdserve.model.config import ModelConfig
from pdserve.model.groups import Groups, mxfp4
from pdserve.model.loading import load_model, needed_weights, shapes_of
from pdserve.model.ops import weight_bytes
from pdserve.model.stacked import apart
from pdserve.model.weights import Shard, Weights
from pdserve.settings.degrees import Degrees

INNER, HIDDEN, COUNT = 6, 8, 3
BASE = {
    "vocab_size": 20,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_local_experts": COUNT,
    "num_experts_per_tok": 2,
}
GPT_OSS = ModelConfig.from_hf({**BASE, "architectures": ["GptOssForCausalLM"]})
GRANITE = ModelConfig.from_hf({**BASE, "architectures": ["GraniteMoeForCausalLM"]})
EXPERTS = "model.layers.0.mlp.experts"


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def of_gpt_oss() -> dict[str, Tensor]:
    return {
        f"{EXPERTS}.gate_up_proj": random(COUNT, HIDDEN, 2 * INNER),
        f"{EXPERTS}.gate_up_proj_bias": random(COUNT, 2 * INNER),
        f"{EXPERTS}.down_proj": random(COUNT, INNER, HIDDEN),
        f"{EXPERTS}.down_proj_bias": random(COUNT, HIDDEN),
    }


def values(weights: Weights, name: str, *part: slice) -> Tensor:
    read = weights[name].read(part)
    assert isinstance(read, Tensor)
    assert part or read.shape == weights[name].shape
    return read


@pytest.mark.parametrize("expert", range(COUNT))
def test_gates_and_ups_that_alternate_are_told_apart(expert: int) -> None:
    given = of_gpt_oss()
    both, biases = given[f"{EXPERTS}.gate_up_proj"][expert], given[f"{EXPERTS}.gate_up_proj_bias"][expert]
    weights, own = apart(held(given), GPT_OSS), f"{EXPERTS}.{expert}"
    for first, name in enumerate(("gate", "up")):
        assert torch.equal(values(weights, f"{own}.{name}_proj.weight"), both[:, first::2].T)
        assert torch.equal(values(weights, f"{own}.{name}_proj.bias"), biases[first::2])
    assert torch.equal(values(weights, f"{own}.down_proj.weight"), given[f"{EXPERTS}.down_proj"][expert].T)
    assert torch.equal(values(weights, f"{own}.down_proj.bias"), given[f"{EXPERTS}.down_proj_bias"][expert])


@pytest.mark.parametrize("expert", range(COUNT))
def test_gates_that_come_first_are_told_from_ups(expert: int) -> None:
    block = "model.layers.0.block_sparse_moe"
    both, down = random(COUNT, 2 * INNER, HIDDEN), random(COUNT, HIDDEN, INNER) * 2
    weights = apart(held({f"{block}.input_linear.weight": both, f"{block}.output_linear.weight": down}), GRANITE)
    own = f"{block}.experts.{expert}"
    assert torch.equal(values(weights, f"{own}.gate_proj.weight"), both[expert, :INNER])
    assert torch.equal(values(weights, f"{own}.up_proj.weight"), both[expert, INNER:])
    assert torch.equal(values(weights, f"{own}.down_proj.weight"), down[expert])


def test_a_ranks_part_is_that_of_each_matrix() -> None:
    weights, whole = apart(held(of_gpt_oss()), GPT_OSS), apart(held(of_gpt_oss()), GPT_OSS)
    for axis, name in ((0, "gate_proj"), (1, "down_proj")):
        full = f"{EXPERTS}.1.{name}.weight"
        part = Shard(axis, 1, 2).part(full, weights[full])
        assert torch.equal(values(weights, full, *part), values(whole, full)[part])


def test_each_expert_reads_its_own_bytes_alone() -> None:
    asked = []
    stored = held(of_gpt_oss())
    watched = {
        name: type(each)(each.shape, lambda part, each=each: asked.append(part) or each.read(part))
        for name, each in stored.items()
    }
    values(apart(watched, GPT_OSS), f"{EXPERTS}.2.up_proj.weight")
    assert asked == [(slice(2, 3),)]


def test_stacks_that_are_missing_or_misshapen_are_named() -> None:
    given = of_gpt_oss()
    for name in given:
        with pytest.raises(ConfigError, match=f"^{name}: missing from the weights"):
            apart(held({other: value for other, value in given.items() if other != name}), GPT_OSS)
        with pytest.raises(ConfigError, match=f"^{name}: shape .*, the config asks for"):
            apart(held({**given, name: random(COUNT, 5, 5)}), GPT_OSS)


def test_nothing_of_a_stack_is_left_over() -> None:
    left = apart(held(of_gpt_oss()), GPT_OSS)
    assert set(left) == {name for name in shapes_of(GPT_OSS) if ".experts." in name}
    with pytest.raises(ConfigError, match="missing from the weights"):
        load_model(GPT_OSS, left, torch.float32)


def in_mxfp4(*shape: int) -> dict[str, Tensor]:
    """Return random codes and scales of GPT-OSS's gates and ups."""
    draw = torch.Generator().manual_seed(11)
    blocks, scales = (*shape, 1, 16), (*shape, 1)
    return {
        f"{EXPERTS}.gate_up_proj_blocks": torch.randint(0, 256, blocks, generator=draw, dtype=torch.uint8),
        f"{EXPERTS}.gate_up_proj_scales": torch.randint(100, 140, scales, generator=draw, dtype=torch.uint8),
    }


WIDE = ModelConfig.from_hf(
    {
        **BASE,
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 32,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
)


def of_wide(coded: dict[str, Tensor]) -> dict[str, Tensor]:
    others = {name: value for name, value in of_gpt_oss().items() if "down" not in name and name.endswith("bias")}
    down = {f"{EXPERTS}.down_proj": random(COUNT, INNER, 32), f"{EXPERTS}.down_proj_bias": random(COUNT, 32)}
    return {**others, **down, **coded}


def test_codes_of_mxfp4_are_values_of_the_published_table_times_powers_of_two() -> None:
    coded = in_mxfp4(COUNT, 2 * INNER)
    weights = apart(held(of_wide(coded)), WIDE)
    for expert in range(COUNT):
        codes = coded[f"{EXPERTS}.gate_up_proj_blocks"][expert, :, 0].tolist()
        scales = coded[f"{EXPERTS}.gate_up_proj_scales"][expert, :, 0].tolist()
        rows = []
        for row, scale in zip(codes, scales, strict=True):
            nibbles = [nibble for byte in row for nibble in (byte % 16, byte // 16)]
            rows.append([by_hand(nibble) * 2.0 ** (scale - 127) for nibble in nibbles])
        for first, name in enumerate(("gate", "up")):
            found = values(weights, f"{EXPERTS}.{expert}.{name}_proj.weight")
            assert found.tolist() == rows[first::2]
            assert torch.equal(found, found.bfloat16().float()), "nothing is lost in the dtype of the model"


def by_hand(nibble: int) -> float:
    """Return a float of one sign, two exponent and one mantissa bit."""
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if nibble & 8 else size


def test_mxfp4_is_decoded_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415 - its room is large

    coded = in_mxfp4(COUNT, 2 * INNER)
    expected = convert_moe_packed_tensors(*coded.values(), dtype=torch.float32)  # [experts, inputs, outputs]
    weights = apart(held(of_wide(coded)), WIDE)
    for expert in range(COUNT):
        found = values(weights, f"{EXPERTS}.{expert}.up_proj.weight")
        assert torch.equal(found, expected[expert, :, 1::2].T)


@pytest.mark.parametrize("outlier", [140, 141, 100])
def test_a_stack_in_mxfp4_is_kept_if_products_take_all_of_its_scales_else_all_is_decoded(
    outlier: int, caplog: pytest.LogCaptureFixture
) -> None:
    coded = in_mxfp4(COUNT, 2 * INNER)
    scales = coded[f"{EXPERTS}.gate_up_proj_scales"].clamp_(104, 140)
    scales[1, 3] = outlier  # 12 times a half of 2 ** (141 - 127) is no float16
    scales[2, 4], coded[f"{EXPERTS}.gate_up_proj_blocks"][2, 4] = 0, 0x80  # a block of zeros has any scale
    kept, decoded = (apart(held(of_wide(coded)), WIDE, keep_coded=each) for each in (True, False))
    for expert in range(COUNT):
        for name in ("gate", "up"):
            own = f"{EXPERTS}.{expert}.{name}_proj.weight"
            for part in ((), (slice(2, 5),), (slice(None), slice(0, 32))):
                found, expected = kept[own].read(part), decoded[own].read(part)
                assert isinstance(found, Groups) == (outlier == 140)
                if isinstance(found, Groups):
                    assert found.fp4
                    found = torch.from_numpy(found.values())
                assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
        assert (kept[own].group, decoded[own].group) == (32, 1)
    said = f"{EXPERTS}.gate_up_proj_scales: one is beyond what products take; all experts are decoded"
    assert [record.getMessage() for record in caplog.records] == ([] if outlier == 140 else [said])


def test_a_block_of_zeros_in_mxfp4_has_no_scale() -> None:
    zeros, scales = np.zeros((1, 2, 16), np.uint8), np.array([[120, 130]], np.uint8)
    found = mxfp4(zeros, scales)
    assert found is not None
    assert not found.scales.any(), "its products are exactly zero, whatever its inputs are"
    assert not found.minimums.any()
    assert mxfp4(zeros, np.array([[120, 255]], np.uint8)) is None, "this is not a number"


def test_broken_mxfp4_is_named() -> None:
    coded = in_mxfp4(COUNT, 2 * INNER)
    scales = f"{EXPERTS}.gate_up_proj_scales"
    with pytest.raises(ConfigError, match=f"^{scales}: missing"):
        apart(held(of_wide({name: value for name, value in coded.items() if name != scales})), WIDE)
    with pytest.raises(ConfigError, match=f"^{EXPERTS}.gate_up_proj_blocks: shape"):
        apart(held(of_wide(in_mxfp4(COUNT, INNER))), WIDE)
    coded[scales][1, 3] = 255
    weights = apart(held(of_wide(coded)), WIDE)
    values(weights, f"{EXPERTS}.0.up_proj.weight")
    with pytest.raises(ConfigError, match=f"^{scales}: scale 255"):
        weights[f"{EXPERTS}.1.up_proj.weight"].read(())
    with pytest.raises(ConfigError, match="gate_up_proj_blocks: 8 inputs are not whole blocks of 32"):
        apart(held({**of_gpt_oss(), **coded}), GPT_OSS)


def kept_in(opened: Checkpoint) -> Weights:
    assert opened.coded_as == "mxfp4"
    assert opened.coded_weights is not None
    return opened.coded_weights()


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_directory_in_mxfp4_answers_as_its_decoded_weights_do(tmp_path: Path, *, is_kept: bool) -> None:
    plain, coded = write_in_mxfp4(tmp_path)
    opened = open_directory(coded)
    weights = kept_in(opened) if is_kept else opened.weights()
    model, oracle = load_model(opened.config, weights, torch.float32), load_oracle(plain)
    assert is_kept == any(isinstance(each, Tiles) and each.is_float for each in model.matrices())
    asked = [prompt(length) for length in (5, 150)]
    for each, answer in zip(asked, greedy_texts(Runner(model, 40, 16), asked, 24), strict=True):
        assert len(set(answer)) > 4
        assert first_disagreement(oracle, each, answer) is None


@pytest.mark.slow
def test_ranks_divide_experts_in_mxfp4_in_whole_blocks_and_draw_the_tokens_of_one_rank(tmp_path: Path) -> None:
    opened, asked = open_directory(write_in_mxfp4(tmp_path, intermediate_size=160)[1]), [prompt(5), prompt(150)]
    whole = load_model(opened.config, kept_in(opened), torch.float32)
    expected = greedy_texts(Runner(whole, 40, 16), asked, 16)
    with thread_ranks(Degrees(2), opened.config, kept_in(opened), torch.float32, 40) as ranks:
        inners = [
            {each.inputs for each in own.matrices() if isinstance(each, Tiles) and each.is_float}
            for own in ranks.models
        ]
        assert greedy_texts(ranks, asked, 16) == expected
    assert inners == [{64}, {64, 96}], "the first has 2 of 5 blocks of 32; the hidden size is 64"


@pytest.mark.slow
def test_the_bytes_that_experts_in_mxfp4_take_are_estimated_as_products_hold_them(tmp_path: Path) -> None:
    opened = open_directory(write_in_mxfp4(tmp_path)[1])
    experts = {
        name: stored
        for name, stored in needed_weights(opened.config, kept_in(opened)).items()
        if ".experts." in name and name.endswith(".weight")
    }
    model = load_model(opened.config, kept_in(opened), torch.bfloat16)
    held_bytes = sum(weight_bytes(each) for each in model.matrices() if isinstance(each, Tiles) and each.is_float)
    assert estimated_bytes(experts, "bfloat16", "cpu") == held_bytes


def test_experts_of_qwen_are_read_from_stacks_and_from_tensors_of_their_own(tmp_path: Path) -> None:
    """Published files have stacks in layers, and either in the module that guesses."""
    own = load_file(write_model_with_module("qwen3.5-moe", tmp_path) / "model.safetensors")
    config = open_directory(tmp_path).config
    for prefixes in ([f"model.layers.{layer}." for layer in range(3)], ["mtp.layers.0."]):
        stacked = {
            name: each for name, each in own.items() if not name.startswith(tuple(prefixes)) or ".experts." not in name
        }
        for prefix in prefixes:
            block = f"{prefix}mlp.experts"
            gates, ups, downs = (
                torch.stack([own[f"{block}.{expert}.{part}_proj.weight"] for expert in range(6)])
                for part in ("gate", "up", "down")
            )
            stacked |= {f"{block}.gate_up_proj": torch.cat((gates, ups), 1), f"{block}.down_proj": downs}
        assert len(stacked) < len(own)
        found = apart(held(stacked), config)
        assert found.keys() == own.keys()
        assert all(torch.equal(values(found, name), tensor) for name, tensor in own.items())
