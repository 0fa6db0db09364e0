"""Quantized tensors of GGUF files are kept as they are coded."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from held_weights import read_all

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.gguf_weights import read_groups
from pdserve.checkpoint.open import open_checkpoint
from pdserve.model.groups import Groups, joined_groups, quantized
from pdserve.model.weights import Codes

WriteGguf = Callable[..., Path]

EXACT = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]
WIDTH, INPUTS = 6, 512


def random_blocks(kind: Kind) -> np.ndarray:
    """Return rows of random codes whose float16 scales are finite."""
    rng = np.random.default_rng(0)
    row_bytes = gguf.quant_shape_to_byte_shape((WIDTH, INPUTS), kind)
    coded = rng.integers(0, 256, row_bytes, dtype=np.uint8)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = coded.reshape(-1, block_bytes)
    places = {Kind.Q6_K: (block_bytes - 2,), Kind.Q5_0: (0,), Kind.Q4_0: (0,), Kind.Q8_0: (0,)}.get(kind, (0, 2))
    for place in places:
        blocks[:, place : place + 2] = rng.uniform(0.001, 0.02, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return coded


@pytest.mark.parametrize("kind", EXACT)
def test_codes_scales_and_minimums_are_those_of_the_file(kind: Kind) -> None:
    coded = random_blocks(kind)
    groups = read_groups(coded, kind)
    assert groups.bits == (8 if kind is Kind.Q8_0 else 4)
    np.testing.assert_allclose(groups.values(), gguf.dequantize(coded, kind), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("first", "last", "is_exact"), [(104, 140, True), (0, 100, False)])
def test_values_of_mxfp4_are_kept_where_scales_are_float16s(first: int, last: int, *, is_exact: bool) -> None:
    coded = random_blocks(Kind.MXFP4)
    blocks = coded.reshape(-1, 17)
    blocks[:, 0] = np.linspace(first, last, len(blocks)).round()
    blocks[3] = (0, *(0x80,) * 16)  # nothing but zeros, of either sign
    groups, values = read_groups(coded, Kind.MXFP4), gguf.dequantize(coded, Kind.MXFP4)
    assert (groups.bits, groups.fp4) == ((4, True) if is_exact else (8, False))
    assert np.array_equal(groups.values(), values) == is_exact


def test_values_beyond_float16_are_refused() -> None:
    coded = random_blocks(Kind.MXFP4)
    coded.reshape(-1, 17)[:, 0] = 141  # the power of two
    with pytest.raises(ValueError, match="a value of magnitude 98304 cannot be rounded to 8 bits: the limit is 65504"):
        read_groups(coded, Kind.MXFP4)


def test_scales_of_q4_k_are_multiplied_out_to_float16() -> None:
    coded = random_blocks(Kind.Q4_K)
    groups, values = read_groups(coded, Kind.Q4_K), gguf.dequantize(coded, Kind.Q4_K)
    assert groups.bits == 4
    assert np.abs(groups.values() - values).max() < 2**-10 * np.abs(values).max()


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q6_K, Kind.Q5_K])
def test_other_types_are_rounded_to_8_bits(kind: Kind) -> None:
    coded = random_blocks(kind)
    groups, values = read_groups(coded, kind), gguf.dequantize(coded, kind)
    assert groups.bits == 8
    steps = np.abs(groups.scales.astype(np.float32)).repeat(32, axis=1)
    assert (np.abs(groups.values() - values) <= 1.05 * steps).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_floats_are_rounded_by_at_most_a_step(bits: int) -> None:
    values = np.random.default_rng(1).normal(size=(5, 96)).astype(np.float32)
    values[2, :32] = 0.0
    groups = quantized(values, bits)
    errors = np.abs(groups.values() - values).reshape(5, 3, 32)
    steps = np.abs(groups.scales.astype(np.float32))
    assert (errors <= 1.01 * steps[..., None]).all()  # a whole one where the other end has no code
    assert (np.median(errors, -1) <= 0.5 * steps).all()


def test_matrices_of_different_bits_are_joined_without_a_change() -> None:
    values = np.random.default_rng(1).normal(size=(5, 96)).astype(np.float32)
    four, eight = quantized(values, 4), quantized(values, 8)
    joined = joined_groups(four, eight)
    assert joined.bits == 8
    np.testing.assert_array_equal(joined.values(), np.concatenate((four.values(), eight.values())))
    assert joined_groups(four, four).bits == 4
    coded = random_blocks(Kind.MXFP4)
    coded.reshape(-1, 17)[:, 0] = 120  # the power of two
    floats = read_groups(coded, Kind.MXFP4)
    alone, beside = joined_groups(floats, floats), joined_groups(floats, quantized(floats.values(), 4))
    assert [(each.bits, each.fp4) for each in (alone, beside)] == [(4, True), (8, False)]
    np.testing.assert_array_equal(alone.values(), np.concatenate((floats.values(), floats.values())))
    np.testing.assert_array_equal(beside.values()[: len(floats.values())], floats.values())


def test_a_file_keeps_its_codes_where_that_is_asked_for(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    values = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    plain = {"token_embd.weight": values, "blk.0.attn_norm.weight": np.ones(32, np.float32)}
    assert open_checkpoint(write_gguf("llama", metadata, plain)).coded_weights is None
    path = write_gguf("llama", metadata, plain, {"blk.0.attn_q.weight": (values, Kind.Q4_1)})
    checkpoint = open_checkpoint(path)
    floats, coded = read_all(checkpoint.weights()), read_all(weights_in_form(checkpoint, "gguf"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(coded[name], Groups)
    np.testing.assert_allclose(coded[name].values(), floats[name], rtol=1e-6, atol=1e-7)
    assert isinstance(coded["model.embed_tokens.weight"], np.ndarray)
    rounded = read_all(weights_in_form(checkpoint, "int4"))
    assert {each: rounded[each].bits for each in (name, "model.embed_tokens.weight")} == {
        name: 4,
        "model.embed_tokens.weight": 8,
    }
    assert isinstance(rounded["model.layers.0.input_layernorm.weight"], np.ndarray)
    for kind, codes in (
        (Kind.Q4_0, Codes(4, 32)),
        (Kind.Q4_1, Codes(4, 32, has_zeros=True)),
        (Kind.Q8_0, Codes(8, 32)),
    ):
        each = open_checkpoint(write_gguf("llama", metadata, plain, {"blk.0.attn_q.weight": (values, kind)}))
        assert weights_in_form(each, "gguf")[name].codes == codes


def test_auto_keeps_codes_with_bfloat16_and_on_a_gpu_with_float16(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    values = np.ones((4, 32), np.float32)
    floats = open_checkpoint(write_gguf("llama", metadata, {"token_embd.weight": values}))
    assert choose_quantization("auto", floats, "bfloat16", "auto") == "none"
    with pytest.raises(ConfigError, match=r"quantization: gguf: .*tiny\.gguf has no weights in such codes"):
        choose_quantization("gguf", floats, "bfloat16", "cpu")
    coded = open_checkpoint(write_gguf("llama", metadata, {}, {"token_embd.weight": (values, Kind.Q8_0)}))
    chosen = {
        (dtype, device): choose_quantization("auto", coded, dtype, device)
        for device in ("cpu", "cuda")
        for dtype in ("bfloat16", "float16", "float32")
    }
    assert list(chosen.values()) == ["gguf", "none", "none", "gguf", "gguf", "none"]
    assert choose_quantization("gguf", coded, "float32", "cpu") == "gguf"
    assert choose_quantization("int8", coded, "float32", "interpreter") == "int8"
    with pytest.raises(ConfigError, match="quantization: int4 goes with dtype bfloat16 or float32, not float16"):
        choose_quantization("int4", coded, "float16", "cpu")


def test_a_type_that_nobody_knows_is_named_with_its_tensor(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    path = write_gguf("llama", metadata, {}, {"token_embd.weight": (np.ones((4, 32), np.float32), Kind.Q8_0)})
    whole = path.read_bytes()
    place = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    path.write_bytes(whole[:place] + (77).to_bytes(4, "little") + whole[place + 4 :])
    for form in ("none", "gguf"):
        with pytest.raises(ConfigError, match=r"tiny\.gguf: token_embd\.weight: type 77 cannot be decoded"):
            read_all(weights_in_form(open_checkpoint(path), form))
