"""How llama.cpp writes each family of models: names, keys, and what its converter changes.

Sources: the modules of `conversion/` and `src/models/` in https://github.com/ggml-org/llama.cpp, and
`tensor_mapping.py` of the `gguf` package. Free of numpy.
"""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.checkpoint.gguf_family import (
    CHOOSING,
    FUSED,
    HEAD_NORMS,
    LAYER_EPSILON,
    LAYER_NAMES,
    NUM_MORE,
    OF_GRANITE,
    SHARED_GATE,
    TOP_NAMES,
    Experts,
    GgufFamily,
    Number,
    Shapes,
    Windows,
    shared,
    without,
)
from pdserve.checkpoint.gguf_states import SPACE_KEYS, STATEFUL
from pdserve.model.fields import Fields

_ATTENTION, _MLP = {"attention_bias": "attn_q"}, {"mlp_bias": "ffn_gate"}
_FUSED_MLP = {**without("ffn_gate"), "ffn_up": "mlp.gate_up_proj"}
_AFTER_ALONE = {  # norms after attention and MLP, none before
    **without("attn_norm", "ffn_norm"),
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BETWEEN_NORMS = {
    **LAYER_NAMES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_MIXTRAL = Experts(
    "MixtralForCausalLM", "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size"
)
_OF_GLM = Experts(
    "Glm4MoeForCausalLM",
    "mlp",
    count="n_routed_experts",
    by_sigmoid=True,
    scaled=True,
    others={
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "nextn_predict_layers": NUM_MORE,
    },
)
_LLAMA = GgufFamily("LlamaForCausalLM", biases=_ATTENTION | _MLP, interleaved=True)

WITHOUT_HEAD_NORMS = 128  # experts of the only Llama 4 without norms of q and k, as llama.cpp has it


def _llama4(fields: Fields, _: Shapes) -> dict[str, object]:
    """Return what llama.cpp takes to be alike in all models."""
    if fields.has("attention.sliding_window"):  # 0: no layer sees its block alone
        raise fields.unsupported("attention.sliding_window", "no such key: blocks of 8192 tokens")
    return {
        "intermediate_size_mlp": fields.positive("feed_forward_length"),
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": fields.positive("expert_count") != WITHOUT_HEAD_NORMS,
    }


FAMILIES: Mapping[str, GgufFamily] = {  # by `general.architecture`
    **STATEFUL,
    "llama": replace(_LLAMA, windows=Windows("MistralForCausalLM"), experts=_OF_MIXTRAL),
    "qwen2": GgufFamily("Qwen2ForCausalLM", biases=_ATTENTION | _MLP),
    "qwen3": GgufFamily("Qwen3ForCausalLM", LAYER_NAMES | HEAD_NORMS, biases=_ATTENTION | _MLP),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        LAYER_NAMES | HEAD_NORMS,
        biases=_ATTENTION,
        experts=Experts("Qwen3MoeForCausalLM", "mlp", own={"norm_topk_prob": True}),
    ),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        LAYER_NAMES | shared("shared_expert") | {SHARED_GATE: "mlp.shared_expert_gate"},
        experts=Experts(
            "Qwen2MoeForCausalLM",
            "mlp",
            others={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            own={"norm_topk_prob": False},
        ),
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        without("ffn_norm")
        | HEAD_NORMS
        | shared("shared_experts")
        | {"post_attention_norm": "post_attention_layernorm"},
        bare_names={CHOOSING: "mlp.gate.e_score_correction_bias"},
        biases=_ATTENTION,
        weights={"use_qk_norm": "attn_q_norm"},
        experts=_OF_GLM,
        partial_rope=True,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        without("ffn_norm") | {"post_attention_norm": "post_attention_layernorm"},
        bare_names={"attn_sinks": "self_attn.sinks"},
        biases=_ATTENTION,
        rope={"truncate": False},
        windows=Windows("GptOssForCausalLM", period=2, required=True),
        experts=Experts(
            "GptOssForCausalLM", "mlp", count="num_local_experts", inner_size="intermediate_size", router="router"
        ),
    ),
    "granitemoe": replace(
        _LLAMA,
        architecture="GraniteMoeForCausalLM",
        biases=_ATTENTION,
        numbers=OF_GRANITE,
        experts=Experts(
            "GraniteMoeForCausalLM",
            "block_sparse_moe",
            count="num_local_experts",
            inner_size="intermediate_size",
            router="router.layer",
        ),
    ),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM",
        LAYER_NAMES | HEAD_NORMS,
        bare_names={CHOOSING: "block_sparse_moe.e_score_correction_bias"},
        experts=replace(_OF_MIXTRAL, architecture="MiniMaxM2ForCausalLM", by_sigmoid=True),
        partial_rope=True,
    ),
    "apertus": GgufFamily(
        "ApertusForCausalLM",
        {
            **without("ffn_gate"),
            **HEAD_NORMS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        biases=_ATTENTION,
        xielu=True,
    ),
    "arcee": replace(
        _LLAMA,
        architecture="ArceeForCausalLM",
        names=without("ffn_gate"),
        biases=_ATTENTION | {"mlp_bias": "ffn_up"},
    ),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM",
        without("ffn_norm"),
        biases=_ATTENTION,
        epsilon=Number(LAYER_EPSILON, "layer_norm_eps"),
        numbers=(Number("logit_scale", "logit_scale"),),
        windows=Windows("Cohere2ForCausalLM", period=4, required=True),
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        {
            **without("attn_k", "attn_v"),
            **shared("shared_experts"),
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
        },
        bare_names={CHOOSING: "mlp.gate.e_score_correction_bias"},
        experts=replace(_OF_GLM, architecture="DeepseekV3ForCausalLM"),
        has_latents=True,
    ),
    "ernie4_5-moe": GgufFamily(
        "Ernie4_5_MoeForCausalLM",
        LAYER_NAMES | shared("shared_experts"),
        bare_names={CHOOSING: "mlp.moe_statics.e_score_correction_bias"},
        experts=Experts(
            "Ernie4_5_MoeForCausalLM",
            "mlp",
            count="moe_num_experts",
            chosen="moe_k",
            bias_in_row=True,
            others={
                "expert_shared_count": "moe_num_shared_experts",
                "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
            },
        ),
        inert=("expert_shared_feed_forward_length",),  # which follows from the count
    ),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", biases={"use_bias": "attn_q"}),
    "exaone4": GgufFamily("Exaone4ForCausalLM", _AFTER_ALONE, windows=Windows("Exaone4ForCausalLM", period=4)),
    "gemma": GgufFamily("GemmaForCausalLM", biases=_ATTENTION, norms_plus=1.0),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        _BETWEEN_NORMS,
        biases=_ATTENTION,
        numbers=(
            Number("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            Number("final_logit_softcapping", "final_logit_softcapping", 30.0),
        ),
        windows=Windows("Gemma2ForCausalLM", period=2, required=True),
        scores_by_share=46,
        norms_plus=1.0,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        _BETWEEN_NORMS | HEAD_NORMS,
        biases=_ATTENTION,
        windows=Windows("Gemma3ForCausalLM", period=6, required=True, own_rope=True, theta=1e4),
        scores_by_share=62,
        norms_plus=1.0,
    ),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        {**_FUSED_MLP, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        biases=_ATTENTION,
        partial_rope=True,
    ),
    "granite": replace(
        _LLAMA,
        architecture="GraniteForCausalLM",
        numbers=OF_GRANITE,
        inert=(*SPACE_KEYS, "expert_shared_feed_forward_length"),  # of Granite 4 without Mamba, which has them
    ),
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        {
            **LAYER_NAMES,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        biases=_ATTENTION,
    ),
    "llama4": GgufFamily(
        "Llama4ForCausalLM",
        {
            **without("ffn_gate", "ffn_up", "ffn_down"),
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        config=_llama4,
        experts=Experts(
            "Llama4ForCausalLM",
            "feed_forward",
            count="num_local_experts",
            inner_size="intermediate_size",
            router="router",
            by_sigmoid=True,
            others={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        ),
    ),
    "nemotron": GgufFamily(
        "NemotronForCausalLM",
        without("ffn_gate"),
        biases=_ATTENTION | {"mlp_bias": "ffn_up"},
        epsilon=Number(LAYER_EPSILON, "norm_eps"),
        partial_rope=True,
        norms_plus=1.0,
    ),
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM",
        _AFTER_ALONE,
        biases=_ATTENTION,
        windows=Windows("Olmo3ForCausalLM", period=4, own_rope=True),
    ),
    "olmoe": GgufFamily(
        "OlmoeForCausalLM",
        LAYER_NAMES | HEAD_NORMS,
        biases=_ATTENTION,
        experts=Experts("OlmoeForCausalLM", "mlp", inner_size="intermediate_size", own={"norm_topk_prob": False}),
    ),
    "phi2": GgufFamily(
        "PhiForCausalLM",
        {
            **without("ffn_gate", "ffn_norm"),
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {**TOP_NAMES, "output_norm": "model.final_layernorm"},
        epsilon=Number(LAYER_EPSILON, "layer_norm_eps"),
        partial_rope=True,
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        {
            FUSED: "self_attn.qkv_proj",
            **{part: name for part, name in _FUSED_MLP.items() if part not in ("attn_q", "attn_k", "attn_v")},
        },
        windows=Windows("Phi3ForCausalLM"),
        partial_rope=True,
        long_rope=True,
    ),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        {**without("ffn_norm"), "post_attention_norm": "post_attention_layernorm"},
        biases=_ATTENTION | {"attention_out_bias": "attn_output"} | _MLP,
    ),
    "smollm3": replace(_LLAMA, architecture="SmolLM3ForCausalLM"),
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM",
        {**without("ffn_gate"), "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases={"use_bias": "attn_q"},
        epsilon=Number(LAYER_EPSILON, "norm_epsilon"),
    ),
}
