"""Matrices of codes that ranks cannot divide in whole groups are refused from headers: by name, ranks and group."""

from dataclasses import replace

import pytest

from pdserve.base.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.cuts import check_cuts
from pdserve.model.loading import shapes_of
from pdserve.model.weights import Codes, Part, Stored, Weights
from pdserve.settings.degrees import Degrees

INT4, MXFP4 = Codes(4, 128), Codes(4, 32)
IN_AN_ORDER = replace(INT4, in_order=False)
FP8_OF_OUTPUTS, FP8_OF_BLOCKS = Codes(8, 10**6, is_fp8=True), Codes(8, 128, is_fp8=True)
SIX, FIVE = (6, 2, 128), (5, 5, 64)  # heads, those of keys and values, and their features


def opened(heads: tuple[int, int, int], inner_size: int, codes: Codes) -> tuple[ModelConfig, Weights]:
    """Return a model whose layers have matrices of codes, none of which may be read."""

    def not_read(part: Part) -> object:
        raise AssertionError(part)

    num_heads, num_kv_heads, head_dim = heads
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 50,
            "hidden_size": num_heads * head_dim,
            "intermediate_size": inner_size,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
        }
    )
    weights = dict[str, Stored]()
    for name, shape in shapes_of(config).items():
        is_coded, unit = ".layers." in name and len(shape) == 2, 128 if codes is FP8_OF_BLOCKS else 32
        group = unit if is_coded and shape[1] % unit == 0 else 1
        weights[name] = Stored(shape, not_read, group, codes if is_coded else None)  # type: ignore[arg-type]
    return config, weights


@pytest.mark.parametrize(
    ("codes", "heads", "inner_size", "size"),
    [
        (INT4, SIX, 512, 2),
        (INT4, SIX, 320, 2),  # both parts of a group of 128 keep its scale
        (MXFP4, SIX, 160, 2),  # two of five blocks, and three
        (MXFP4, SIX, 384, 6),  # three ranks have the same KV head
        (FP8_OF_OUTPUTS, SIX, 100, 2),
        (FP8_OF_BLOCKS, SIX, 384, 2),
        (FP8_OF_BLOCKS, FIVE, 256, 2),  # the second has 192 of 320 inputs, and so half a block at the end
    ],
)
def test_matrices_are_divided_in_whole_groups(
    codes: Codes, heads: tuple[int, int, int], inner_size: int, size: int
) -> None:
    check_cuts(*opened(heads, inner_size, codes), Degrees(size))


@pytest.mark.parametrize(
    ("codes", "heads", "inner_size", "size", "named"),
    [
        (MXFP4, SIX, 96, 6, r"mlp.gate_proj.weight: 96 in units of 32 cannot be split over 6 ranks"),
        (FP8_OF_BLOCKS, SIX, 200, 2, "mlp.down_proj.weight: inputs 0 to 100 of 200 .* groups of 128, for rank 0 of 2"),
        (FP8_OF_BLOCKS, FIVE, 256, 5, "self_attn.o_proj.weight: inputs 0 to 64 of 320 .* of 128, for rank 0 of 5"),
        (IN_AN_ORDER, SIX, 512, 2, "self_attn.o_proj.weight: its groups of inputs are in an order .*, for 2 ranks"),
    ],
)
def test_what_would_part_a_group_is_named_before_anything_is_read(
    codes: Codes, heads: tuple[int, int, int], inner_size: int, size: int, named: str
) -> None:
    config, weights = opened(heads, inner_size, codes)
    with pytest.raises(ConfigError, match=rf"^model\.layers\.0\.{named}; --quantization none decodes all$"):
        check_cuts(config, weights, Degrees(size))
    check_cuts(config, weights, Degrees(1))


def test_floats_that_cannot_be_divided_are_named() -> None:
    config, weights = opened(SIX, 8, INT4)
    floats = {name: replace(stored, group=1, codes=None) for name, stored in weights.items()}
    with pytest.raises(ConfigError, match=r"^model.layers.0.mlp.gate_proj.weight: 8 in units of 2 .* over 6 ranks$"):
        check_cuts(config, floats, Degrees(6))
