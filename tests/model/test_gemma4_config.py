"""What is read of Gemma 4's configs, and what is refused by name."""

import pytest
import torch

from pdserve.base.errors import ConfigError
from pdserve.executor.form import choose_kv_code
from pdserve.executor.kernel_checks import check_kernels
from pdserve.executor.layouts import describe_layout
from pdserve.executor.rank_memory import own_layout
from pdserve.model.config import ModelConfig
from pdserve.model.design import BesideExperts, GatedMlp, SelfAttention, Sequential
from pdserve.model.kv_heads import Heads
from pdserve.model.rope_config import RopeConfig
from pdserve.model.sharding import check_divides
from pdserve.settings.degrees import Degrees

KINDS = (["sliding_attention"] * 5 + ["full_attention"]) * 2
TEXT: dict[str, object] = {  # such as that of the dense model with 31B parameters, with fewer layers
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 21504,
    "layer_types": KINDS,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


OF_TABLE = "vocab_size_per_layer_input"


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf({**TEXT, "architectures": ["Gemma4ForCausalLM"], **changes})


SMALL: dict[str, object] = {  # such as that of E2B
    "attention_k_eq_v": False,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_double_wide_mlp": True,
}
ALL_ALIKE = {"layer_types": ["full_attention"] * 12, "global_head_dim": 256}


def attentions(config: ModelConfig) -> list[SelfAttention]:
    return [each for each in config.design.attentions if isinstance(each, SelfAttention)]


def test_the_last_layers_read_keys_and_values_of_the_last_ones_of_their_kind_that_have_some() -> None:
    config = read(**SMALL)
    assert [each.reads for each in attentions(config)] == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert config.design.readers == {place: 14 if place % 5 == 4 else 13 for place in range(15, 35)}
    mlps = [layer.mlp for layer in config.design.layers if isinstance(layer.mlp, GatedMlp)]
    assert [mlp.inner_size for mlp in mlps] == [6144] * 15 + [12288] * 20
    assert read(**{**SMALL, "num_kv_shared_layers": 0}).design.readers == {}


def test_mlps_and_not_experts_are_twice_as_wide_where_layers_read() -> None:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}
    last = read(**SMALL, **experts).design.layers[-1].mlp
    assert isinstance(last, BesideExperts)
    assert (last.mlp.inner_size, last.experts.expert.inner_size) == (12288, 704)


def test_pages_hold_what_the_layers_have_that_make_keys_and_values() -> None:
    layout = describe_layout(read(**SMALL), "weights", 16, "bfloat16", "cpu")
    (window,) = layout.others
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_size) == (3, 1, 512, 32)
    assert (window.num_layers, window.num_kv_heads, window.head_dim, window.page_size) == (12, 1, 256, 16)
    assert layout.page_bytes == window.page_bytes("bfloat16") == 12 * 2 * 256 * 2 * 16
    assert layout.token_bytes == (12 * 256 + 3 * 512) * 2 * 2
    alike = describe_layout(read(**ALL_ALIKE, num_kv_shared_layers=7), "weights", 16, "bfloat16", "cpu")
    assert (alike.num_layers, alike.others) == (5, ())


def test_inputs_of_each_layer_have_the_size_that_transformers_gives_them() -> None:
    inputs = read(hidden_size_per_layer_input=None).design.layer_inputs
    assert inputs == read(**SMALL).design.layer_inputs
    assert inputs is not None
    assert inputs.size == 256
    assert [layer.scalar for layer in read(**SMALL).design.layers if isinstance(layer, Sequential)] == [None] * 35
    with pytest.raises(ConfigError, match="hidden_size_per_layer_input: -1 is not an integer from 1"):
        read(hidden_size_per_layer_input=-1)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"num_kv_shared_layers": 7}, "layers that read keys and values of others"),
        ({"hidden_size_per_layer_input": 256}, "inputs of each layer"),
    ],
)
def test_what_no_test_has_compared_is_refused_where_heads_are_alike_too(changes: dict[str, object], kind: str) -> None:
    config = read(**ALL_ALIKE, **changes)
    assert not config.has_unlike_heads
    layout = describe_layout(config, "weights", 16, "bfloat16", "cpu")
    with pytest.raises(ConfigError, match=f"rank_memory: own is not served for a model with {kind}"):
        own_layout(config, layout, Degrees(2))
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: int8 is not served for a model with {kind}"):
        choose_kv_code("int8", config)
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size: 2: {kind} are not served in stages yet"):
        check_divides(config, Degrees(1, 2))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_so_many_ranks_divide_the_heads_of_a_small_model(size: int) -> None:
    check_divides(read(**SMALL), Degrees(size))


def test_layers_that_see_all_tokens_have_heads_of_their_own() -> None:
    config = read()
    sliding, full = (config.design.layers[place].attention for place in (0, 5))
    assert isinstance(sliding, SelfAttention)
    assert isinstance(full, SelfAttention)
    assert (sliding.heads, full.heads) == (Heads(16, 256), Heads(4, 512))
    assert (sliding.has_values, full.has_values) == (True, False)
    assert (config.num_kv_heads, config.head_dim) == (4, 512)
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert full.rope == RopeConfig(1e6, share=0.25, is_cut=True)
    assert full.rope.turning(512) == 128


def test_pages_of_both_kinds_of_layers_have_the_same_bytes() -> None:
    layout = describe_layout(read(), "weights", 16, "bfloat16", "cpu")
    (window,) = layout.others
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_size) == (2, 4, 512, 160)
    assert (window.num_layers, window.num_kv_heads, window.head_dim, window.page_size) == (10, 16, 256, 16)
    assert layout.page_bytes == window.page_bytes("bfloat16")


def test_what_transformers_writes_of_layers_one_by_one_is_the_same() -> None:
    own = {"5": {"head_dim": 512, "num_key_value_heads": 4}, "11": {"head_dim": 512, "num_key_value_heads": 4}}
    assert read(per_layer_config=own, global_head_dim=None, num_global_key_value_heads=None) == read()


def test_the_number_of_other_heads_counts_only_where_keys_are_values() -> None:
    assert read(attention_k_eq_v=False).num_kv_heads == 16


def test_experts_lie_beside_the_mlp() -> None:
    mlp = read(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704).design.layers[0].mlp
    assert isinstance(mlp, BesideExperts)
    assert (mlp.mlp.inner_size, mlp.experts.expert.inner_size) == (21504, 704)
    assert (mlp.experts.num_experts, mlp.experts.routing.num_chosen) == (128, 8)
    with pytest.raises(ConfigError, match="top_k_experts"):
        read(enable_moe_block=True, num_experts=128, top_k_experts=129, moe_intermediate_size=704)


def test_the_last_layer_sees_all_tokens() -> None:
    assert read(layer_types=[*KINDS[:-1], "sliding_attention"]) == read()


def test_a_wrapper_has_the_same_text_part() -> None:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": TEXT}
    others = {"vision_config": {}, "audio_config": None, "image_token_id": 258880, "boi_token_id": 255999}
    assert ModelConfig.from_hf(config | others | {"eoa_token_index": 258883}) == read()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input"),
        ({"hidden_size_per_layer_input": 256, "vocab_size": 9, "vocab_size_per_layer_input": None}, OF_TABLE),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers"),  # no layer that sees all tokens is before them
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"num_global_key_value_heads": 5}, "num_global_key_value_heads"),
        ({"global_head_dim": 511}, "num_global_key_value_heads"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, r"per_layer_config\.0"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),  # and not layer 11
        ({"per_layer_config": {"5": {"sliding_window": 5}}}, r"per_layer_config\.5"),
        ({"per_layer_config": {"12": {"head_dim": 512}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, r"rope_parameters\.full_attention\.rope_type"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "proportional"}}}, "rope_parameters"),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            r"rope_parameters\.sliding_attention\.partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .* is not supported"):
        read(**changes)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_so_many_ranks_divide_heads_of_both_sizes(size: int) -> None:
    check_divides(read(), Degrees(size))


@pytest.mark.parametrize("size", [3, 6, 5, 64])
def test_other_numbers_of_ranks_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {size}: 32 heads"):
        check_divides(read(), Degrees(size))


def test_ranks_with_memory_of_their_own_are_refused() -> None:
    layout = describe_layout(read(), "weights", 16, "bfloat16", "cpu")
    with pytest.raises(ConfigError, match="rank_memory: own is not served for a model with heads of two sizes"):
        own_layout(read(), layout, Degrees(2))


@pytest.mark.parametrize("changes", [{"global_head_dim": 384}, {"layer_types": [KINDS[0]] + [KINDS[-1]] * 11}])
def test_layers_whose_pages_would_not_be_full_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="layer_types: layers with heads of two sizes"):
        describe_layout(read(num_global_key_value_heads=16, **changes), "weights", 16, "bfloat16", "cpu")


def test_kernels_of_gpus_refuse_heads_of_512_features() -> None:
    with pytest.raises(
        ConfigError, match=r"device: interpreter .* head_dim must be a multiple of 16 up to 256, got 512"
    ):
        check_kernels("interpreter", read(), 16, torch.bfloat16)
