"""Matrices that are published in fewer bits are read as what their formats say, and broken ones are named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_runs import greedy_texts
from held_weights import held
from model_zoo import first_disagreement, load_oracle, prompt, write_model
from published_formats import CASES, FP8, GPTQ, INT4, in_words, of_group, published
from thread_ranks import thread_ranks
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.checkpoint.published import decoding, read_format
from pdserve.engine.runner import Runner
from pdserve.model.family import Tensors
from pdserve.model.fp8 import Fp8
from pdserve.model.groups import Groups
from pdserve.model.loading import load_model
from pdserve.settings.degrees import Degrees

KEPT = {  # products take their codes
    **dict.fromkeys(("awq", "gptq", "gptq, 8 bits", "words", "words, with zeros", "int8", "int8, with zeros"), Groups),
    "gptq, order of activations": Groups,
    **dict.fromkeys(("fp8 of outputs", "fp8 of large blocks", "fp8 of tensors"), Fp8),
}


def read_one(config: dict[str, Any], parts: dict[str, Tensor], *, keep_coded: bool = False) -> Any:  # noqa: ANN401
    stored = held({f"x.{name}": value for name, value in parts.items()})
    weights = decoding(stored, read_format({"quantization_config": config}), keep_coded=keep_coded)
    assert set(weights) == {"x.weight"}
    return weights["x.weight"]


@pytest.mark.parametrize("case", CASES)
def test_each_format_stands_for_what_its_packing_says(case: str) -> None:
    config, make = CASES[case]
    parts, expected = make(torch.zeros(64, 96))
    stored = read_one(config, parts)
    assert stored.shape == (64, 96)
    torch.testing.assert_close(stored.read(()), expected, rtol=1e-6, atol=0.0)
    for part in ((slice(16, 48),), (slice(None), slice(32, 64))):
        torch.testing.assert_close(stored.read(part), expected[part], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("case", CASES)
def test_products_take_codes_where_their_groups_allow(case: str) -> None:
    config, make = CASES[case]
    parts, expected = make(torch.zeros(64, 96))
    for part in ((), (slice(16, 48),), (slice(None), slice(32, 64))):
        read = read_one(config, parts, keep_coded=True).read(part)
        is_parted = case == "gptq, order of activations" and len(part) == 2  # which its groups are not
        assert isinstance(read, Tensor if is_parted else KEPT.get(case, Tensor))
        values = read if isinstance(read, Tensor) else torch.from_numpy(read.values())
        torch.testing.assert_close(values, expected[part], rtol=0.0, atol=1e-3)  # of minimums in half precision


def test_blocks_of_fp8_are_parted_where_they_begin() -> None:
    config, make = CASES["fp8 of large blocks"]
    parts, expected = make(torch.zeros(200, 300))
    stored = read_one(config, parts, keep_coded=True)
    assert stored.group == 1, "inputs are no whole blocks: ranks part them as if there were none"
    assert read_one(config, make(torch.zeros(64, 256))[0], keep_coded=True).group == 128
    for part in ((slice(100, 150),), (slice(None), slice(128, 300)), (slice(None), slice(0, 256))):
        assert torch.equal(torch.from_numpy(stored.read(part).values()), expected[part])
    for part in ((slice(None), slice(0, 150)), (slice(None), slice(150, 300))):
        assert torch.equal(stored.read(part), expected[part]), "a segment is parted: it is decoded"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_that_is_not_a_number_is_named(dtype: torch.dtype) -> None:
    config, make = CASES["fp8 of tensors"]
    parts, _ = make(torch.zeros(64, 96))
    parts["weight"] = parts["weight"].float().to(dtype)
    read_one(config, parts, keep_coded=True).read(())
    parts["weight"].view(torch.uint8)[3, 5] = 255
    with pytest.raises(ConfigError, match=r"x\.weight: not finite"):
        read_one(config, parts, keep_coded=True).read(())


def test_scales_that_half_precision_holds_nearly_are_kept_and_others_are_not() -> None:
    parts, expected = in_words(torch.zeros(64, 96))
    for factor in (2.0**-13, 2.0**30):
        given = parts | {"weight_scale": parts["weight_scale"] * factor}
        read = read_one(INT4, given, keep_coded=True).read(())
        assert isinstance(read, Groups) == (factor < 1)  # what is as small as this is nothing beside other weights
        values = torch.from_numpy(read.values()) if isinstance(read, Groups) else read
        torch.testing.assert_close(values, expected * factor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_parts_that_are_missing_misshapen_or_not_finite_are_named(case: str) -> None:
    config, make = CASES[case]
    parts, _ = make(torch.zeros(64, 96))
    for name in parts:
        others = {other: value for other, value in parts.items() if other != name}
        if name not in ("g_idx", "weight_zero_point", "qweight", "weight_scale", "weight_scale_inv"):
            with pytest.raises(ConfigError, match=r"^x\.\w+: "):
                read_one(config, others)
        if "scale" in name:
            wrong = parts | {name: torch.full_like(parts[name], torch.nan)}
            with pytest.raises(ConfigError, match=rf"^x\.{name}: not finite"):
                read_one(config, wrong).read(())
            with pytest.raises(ConfigError, match=r"^x\.\w+: "):
                read_one(config, parts | {name: torch.ones(7, 5)})
    if "weight_shape" in parts:
        with pytest.raises(ConfigError, match=r"^x\.weight_shape: shape"):
            read_one(config, parts | {"weight_shape": torch.tensor([64, 96, 1])})


PUBLISHED = {  # keys beside those above, as files on the hub have them, as far as we know
    "Qwen2.5 by transformers' GPTQConfig": GPTQ
    | {"batch_size": 1, "cache_block_outputs": True, "damp_percent": 0.01, "exllama_config": {"version": 1}}
    | {"dataset": None, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "model_seqlen": 2048},
    "GPTQModel's": GPTQ | {"checkpoint_format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:1.4"]}, "lm_head": False},
    "AWQ by transformers' AwqConfig": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    | {"backend": "autoawq", "do_fuse": False, "modules_to_not_convert": None, "version": "gemm"},
    "DeepSeek-V3.1": FP8 | {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "an old w8a8": of_group(num_bits=8, type="int", strategy="channel", dynamic=False, observer="mse")
    | {"sparsity_config": {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}},
    "GPT-OSS saved again": {"quant_method": "mxfp4", "dequantize": False, "modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize("of", PUBLISHED)
def test_keys_of_published_files_are_known(of: str) -> None:
    read_format({"quantization_config": PUBLISHED[of]})


def test_the_order_of_activations_is_noted() -> None:
    for config in (GPTQ | {"desc_act": True}, of_group(num_bits=4, type="int", actorder="group")):
        assert not read_format({"quantization_config": config}).in_order
    assert read_format({"quantization_config": GPTQ}).in_order


@pytest.mark.slow
def test_the_order_of_activations_keeps_codes_on_a_gpu_unless_there_are_experts(tmp_path: Path) -> None:
    published("gptq, order of activations", write_model("llama3", tmp_path / "plain"), tmp_path / "coded")
    checkpoint = open_directory(tmp_path / "coded")
    assert choose_quantization("auto", checkpoint, "bfloat16", "cuda") == "gptq"
    assert choose_quantization("auto", checkpoint, "bfloat16", "cpu") == "none"
    with pytest.raises(ConfigError, match=r"^quantization: gptq: .* has no weights in such codes"):
        choose_quantization("gptq", checkpoint, "bfloat16", "cpu")
    with_experts = replace(checkpoint, config=open_directory(write_model("mixtral", tmp_path / "experts")).config)
    assert choose_quantization("auto", with_experts, "bfloat16", "cuda") == "none"


def test_groups_of_unlike_sizes_keep_no_codes() -> None:
    config, make = CASES["gptq, order of activations"]
    parts, _ = make(torch.zeros(64, 96))
    parts["g_idx"][parts["g_idx"] == 1] = 0
    assert isinstance(read_one(config, parts, keep_coded=True).read(()), Tensor)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_without_scales_are_no_values(dtype: torch.dtype) -> None:
    tensors = Tensors(held({"x.weight": torch.ones(4, 4).to(dtype)}), torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^x\.weight: .* without scales"):
        tensors.take_matrix("x", 4, 4)


def test_scales_of_groups_and_of_whole_matrices_are_spread() -> None:
    q = torch.randn(4, 64).to(torch.float8_e4m3fn)
    for scales in (torch.rand(4, 2), torch.rand(4), torch.rand(1), torch.tensor(0.5)):
        wide = scales.reshape(-1, 1) if scales.dim() < 2 else scales.repeat_interleave(32, 1)
        read = read_one(of_group(num_bits=8, type="float"), {"weight": q, "weight_scale": scales}).read(())
        torch.testing.assert_close(read, q.float() * wide, rtol=0.0, atol=0.0)
    q = torch.randint(-9, 9, (4, 64), dtype=torch.int8)
    read = read_one(of_group(num_bits=8, type="int"), {"weight": q, "weight_scale": torch.tensor(0.5)}).read(())
    assert torch.equal(read, q.float() * 0.5)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("awq", {"scales": torch.tensor(1.0)}),
        ("awq", {"qweight": torch.ones(96, 8)}),
        ("gptq", {"scales": torch.tensor(1.0)}),
        ("fp8 of tensors", {"weight": torch.ones(64, 96, dtype=torch.int8)}),
        ("fp8 of outputs", {"weight_scale": torch.ones(64, 0)}),
        ("int8, with zeros", {"weight_zero_point": torch.ones(3, 1, dtype=torch.int8)}),
        ("words", {"weight_packed": torch.ones(64, 0, dtype=torch.int32), "weight_shape": torch.tensor([64, 0])}),
        ("words", {"weight_scale": torch.tensor(1.0)}),
    ],
)
def test_parts_of_other_kinds_are_named(case: str, changes: dict[str, Tensor]) -> None:
    config, make = CASES[case]
    parts, _ = make(torch.zeros(64, 96))
    with pytest.raises(ConfigError, match=r"^x\.\w+: "):
        read_one(config, parts | changes).read(())


@pytest.mark.parametrize(("case", "name"), [("gptq, order of activations", "g_idx"), ("words", "weight_g_idx")])
def test_groups_that_are_not_there_are_refused(case: str, name: str) -> None:
    config, make = CASES[case]
    parts, _ = make(torch.zeros(64, 96))
    for wrong in (-1, 3):
        with pytest.raises(ConfigError, match=rf"^x\.{name}: not from 0 to 2"):
            read_one(config, parts | {name: torch.full((96,), wrong, dtype=torch.int32)}).read(())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method: 'bitsandbytes' is not supported"),
        ({"load_in_4bit": True}, "quantization_config.quant_method: '' is not supported"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits: 3 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quantization_config.version: 'gemv'"),
        (GPTQ | {"bits": 2}, "quantization_config.bits: 2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format: 'marlin'"),
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt: 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "quantization_config.weight_block_size"),
        (FP8 | {"weight_block_size": [0, 8]}, "quantization_config.weight_block_size"),
        (of_group(type="float", block_structure=[8]), "quantization_config.config_groups.group_0.weights.block_struct"),
        (GPTQ | {"dynamic": {"-:lm_head": {"bits": 8}}}, "quantization_config.dynamic"),
        (
            of_group(num_bits=8, type="int", strategy="block"),
            "quantization_config.config_groups.group_0.weights.strategy",
        ),
        (of_group(num_bits=3, type="int"), "quantization_config.config_groups.group_0.weights.num_bits: 3"),
        (of_group(num_bits=4, type="float"), "quantization_config.config_groups.group_0.weights.num_bits: 4"),
        (FP8 | {"rotation": "hadamard"}, "quantization_config.rotation: 'hadamard' is not supported"),
        (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        read_format({"quantization_config": config})


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "gptq, order of activations",
        *(pytest.param(case, marks=pytest.mark.long) for case in ("awq", "words, with zeros", "fp8 of blocks")),
    ],
)
def test_a_published_model_answers_as_its_decoded_weights_do(case: str, tmp_path: Path) -> None:
    plain = write_model("llama3", tmp_path / "plain")
    published(case, plain, tmp_path / "coded")
    checkpoint, oracle = open_directory(tmp_path / "coded"), load_oracle(plain)
    model = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    asked = [prompt(length) for length in (5, 150)]
    answers = greedy_texts(Runner(model, 40, 16), asked, 24)
    assert len({token for answer in answers for token in answer}) > 4
    for each, answer in zip(asked, answers, strict=True):
        assert first_disagreement(oracle, each, answer) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param("fp8 of outputs", marks=pytest.mark.long), "fp8 of large blocks"])
def test_models_in_fp8_compute_as_their_decoded_weights_do(case: str, tmp_path: Path) -> None:
    published(case, write_model("llama3", tmp_path / "plain", intermediate_size=128), tmp_path / "coded")
    checkpoint = open_directory(tmp_path / "coded")
    kept = choose_quantization("auto", checkpoint, "bfloat16", "cpu")
    assert kept == checkpoint.coded_as != "none"
    coded = load_model(checkpoint.config, weights_in_form(checkpoint, kept), torch.bfloat16)
    plain = load_model(checkpoint.config, checkpoint.weights(), torch.bfloat16)
    assert coded.bytes_read(1) < 0.7 * plain.bytes_read(1)
    found, expected = (greedy_texts(Runner(each, 40, 16), [prompt(5), prompt(150)], 24) for each in (coded, plain))
    assert found == expected, "their scales are powers of two, and an output's inputs share one: the same bits"
    exact = load_model(checkpoint.config, weights_in_form(checkpoint, kept), torch.float32)
    float32 = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    assert exact.bytes_read(1) == float32.bytes_read(1), "products take bfloat16: these are decoded"
    if kept == "fp8":
        with pytest.raises(ConfigError, match=r"^quantization: fp8 goes with dtype bfloat16, not float32"):
            choose_quantization("fp8", checkpoint, "float32", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner_size", [pytest.param(256, marks=pytest.mark.long), 160]
)  # in whole blocks, or with one that is parted
def test_ranks_of_a_model_in_fp8_compute_as_ranks_of_its_decoded_weights_do(inner_size: int, tmp_path: Path) -> None:
    plain = write_model("llama3", tmp_path / "plain", intermediate_size=inner_size)
    published("fp8 of large blocks", plain, tmp_path / "coded")
    checkpoint, found = open_directory(tmp_path / "coded"), []
    for weights in (weights_in_form(checkpoint, "fp8"), checkpoint.weights()):
        with thread_ranks(Degrees(2), checkpoint.config, weights, torch.bfloat16, 40) as ranks:
            found.append(greedy_texts(ranks, [prompt(5), prompt(150)], 16))
    assert found[0] == found[1]


@pytest.mark.slow
def test_codes_are_kept_where_products_take_them(tmp_path: Path) -> None:
    plain = write_model("llama3", tmp_path / "plain")
    published("awq", plain, tmp_path / "coded")
    checkpoint = open_directory(tmp_path / "coded")
    assert choose_quantization("auto", checkpoint, "bfloat16", "cpu") == "awq"
    assert choose_quantization("auto", checkpoint, "float32", "cpu") == "none"
    assert choose_quantization("awq", checkpoint, "float32", "cpu") == "awq"
    with pytest.raises(ConfigError, match=r"^quantization: gptq: .* has no weights in such codes"):
        choose_quantization("gptq", checkpoint, "bfloat16", "cpu")
    weights = weights_in_form(checkpoint, "awq")
    assert isinstance(weights["model.layers.0.self_attn.q_proj.weight"].read(()), Groups)
    asked = [prompt(length) for length in (5, 150)]
    coded, dense = (load_model(checkpoint.config, each, torch.float32) for each in (weights, checkpoint.weights()))
    found, expected = (greedy_texts(Runner(each, 40, 16), asked, 12) for each in (coded, dense))
    assert found == expected
