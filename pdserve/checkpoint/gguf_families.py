"""How llama.cpp writes each family of models: names, keys, and what its converter changes.

A value for each architecture says where its files differ from a Llama's. Sources: the modules of `conversion/` and
`src/models/` in https://github.com/ggml-org/llama.cpp, and `tensor_mapping.py` of the `gguf` package. Free of numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

SHARED_GATE = "ffn_gate_inp_shexp"  # a matrix of one row, which the converter writes as a vector
FUSED = "attn_qkv"  # q, k and v in one: the converter does so for any family, if asked to
RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_ATTENTION, _MLP = {"attention_bias": "attn_q"}, {"mlp_bias": "ffn_gate"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number in the metadata that Hugging Face's config has, too."""

    key: str
    name: str  # in config.json
    default: float | None = None  # None: the file must have it


@dataclass(frozen=True, slots=True)
class Windows:
    """What it means that the metadata have a window. A window of 0 is none."""

    architecture: str  # Hugging Face's
    period: int | None = None  # each so many-th layer sees all tokens, unless the file says which; None: none does
    required: bool = False
    own_rope: bool = False  # layers with a window have a rope of their own, which is not scaled
    theta: float | None = None  # of that rope, unless the file says; None: that of the others


@dataclass(frozen=True, slots=True)
class Experts:
    """What it means that the metadata count experts. Those of a layer are in three tensors of three dimensions."""

    architecture: str  # Hugging Face's
    block: str  # of a layer
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count: str = "num_experts"  # in config.json
    inner_size: str = "moe_intermediate_size"  # in config.json
    router: str = "gate"
    by_sigmoid: bool = False  # how they are scored; else by softmax
    scaled: bool = False  # files say what weights are multiplied with, and whether they are normalized
    others: Mapping[str, str] = field(default_factory=dict)  # whole numbers that files may have, in config.json
    own: Mapping[str, object] = field(default_factory=dict)  # of config.json, which files do not say


NUM_MORE = "num_nextn_predict_layers"  # in config.json; in files, blocks count these too
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What the files of one architecture hold."""

    architecture: str  # Hugging Face's
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)  # of the parts of a layer
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    bare_names: Mapping[str, str] = field(default_factory=dict)  # of parts that are neither weight nor bias there
    biases: Mapping[str, str] = field(default_factory=dict)  # flags of config.json, each with a part that has a bias
    weights: Mapping[str, str] = field(default_factory=dict)  # flags, each with a part that is there
    epsilon: Number = field(default_factory=lambda: Number(RMS_EPSILON, "rms_norm_eps"))
    numbers: tuple[Number, ...] = ()
    rope: Mapping[str, object] = field(default_factory=dict)  # of rope_parameters, which files do not say
    windows: Windows | None = None  # None: a file with a window is refused
    experts: Experts | None = None  # None: a file with experts is refused
    scores_by_share: int | None = None  # scores are scaled by the head, or by hidden size over heads in so many layers
    interleaved: bool = (
        False  # rows of q and k that turn together lie side by side, and on Hugging Face half a head apart
    )
    has_latents: bool = False  # see gguf_latents.py
    partial_rope: bool = False  # a part of each head may turn
    long_rope: bool = False  # the file may have factors for short and for long contexts
    norms_plus: float = 0.0  # what norms in the file have on top of Hugging Face's
    xielu: bool = False  # the metadata have scalars of each layer's activation


def _without(*parts: str) -> dict[str, str]:
    return {part: name for part, name in LAYER_NAMES.items() if part not in parts}


def _shared(block: str) -> dict[str, str]:
    """Return the names of the MLP that every token takes beside its experts."""
    return {f"ffn_{part}_shexp": f"mlp.{block}.{part}_proj" for part in ("gate", "up", "down")}


_FUSED_MLP = {**_without("ffn_gate"), "ffn_up": "mlp.gate_up_proj"}
_AFTER_ALONE = {  # norms after attention and MLP, none before
    **_without("attn_norm", "ffn_norm"),
    **_HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BETWEEN_NORMS = {
    **LAYER_NAMES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_GRANITE = (
    Number("attention.scale", "attention_multiplier"),
    Number("embedding_scale", "embedding_multiplier", 1.0),
    Number("logit_scale", "logits_scaling"),
    Number("residual_scale", "residual_multiplier", 1.0),
)
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

FAMILIES: Mapping[str, GgufFamily] = {  # by `general.architecture`
    "llama": replace(_LLAMA, windows=Windows("MistralForCausalLM"), experts=_OF_MIXTRAL),
    "qwen2": GgufFamily("Qwen2ForCausalLM", biases=_ATTENTION | _MLP),
    "qwen3": GgufFamily("Qwen3ForCausalLM", LAYER_NAMES | _HEAD_NORMS, biases=_ATTENTION | _MLP),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        LAYER_NAMES | _HEAD_NORMS,
        biases=_ATTENTION,
        experts=Experts("Qwen3MoeForCausalLM", "mlp", own={"norm_topk_prob": True}),
    ),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        LAYER_NAMES | _shared("shared_expert") | {SHARED_GATE: "mlp.shared_expert_gate"},
        experts=Experts(
            "Qwen2MoeForCausalLM",
            "mlp",
            others={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            own={"norm_topk_prob": False},
        ),
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        _without("ffn_norm")
        | _HEAD_NORMS
        | _shared("shared_experts")
        | {"post_attention_norm": "post_attention_layernorm"},
        bare_names={"exp_probs_b": "mlp.gate.e_score_correction_bias"},
        biases=_ATTENTION,
        weights={"use_qk_norm": "attn_q_norm"},
        experts=_OF_GLM,
        partial_rope=True,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        _without("ffn_norm") | {"post_attention_norm": "post_attention_layernorm"},
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
        numbers=_OF_GRANITE,
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
        LAYER_NAMES | _HEAD_NORMS,
        bare_names={"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        experts=replace(_OF_MIXTRAL, architecture="MiniMaxM2ForCausalLM", by_sigmoid=True),
        partial_rope=True,
    ),
    "apertus": GgufFamily(
        "ApertusForCausalLM",
        {
            **_without("ffn_gate"),
            **_HEAD_NORMS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        biases=_ATTENTION,
        xielu=True,
    ),
    "arcee": replace(
        _LLAMA,
        architecture="ArceeForCausalLM",
        names=_without("ffn_gate"),
        biases=_ATTENTION | {"mlp_bias": "ffn_up"},
    ),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM",
        _without("ffn_norm"),
        biases=_ATTENTION,
        epsilon=Number(LAYER_EPSILON, "layer_norm_eps"),
        numbers=(Number("logit_scale", "logit_scale"),),
        windows=Windows("Cohere2ForCausalLM", period=4, required=True),
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        {
            **_without("attn_k", "attn_v"),
            **_shared("shared_experts"),
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
        },
        bare_names={"exp_probs_b": "mlp.gate.e_score_correction_bias"},
        experts=replace(_OF_GLM, architecture="DeepseekV3ForCausalLM"),
        has_latents=True,
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
        _BETWEEN_NORMS | _HEAD_NORMS,
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
        numbers=_OF_GRANITE,
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
    "nemotron": GgufFamily(
        "NemotronForCausalLM",
        _without("ffn_gate"),
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
    "phi2": GgufFamily(
        "PhiForCausalLM",
        {
            **_without("ffn_gate", "ffn_norm"),
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
        {**_without("ffn_norm"), "post_attention_norm": "post_attention_layernorm"},
        biases=_ATTENTION | {"attention_out_bias": "attn_output"} | _MLP,
    ),
    "smollm3": replace(_LLAMA, architecture="SmolLM3ForCausalLM"),
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM",
        {**_without("ffn_gate"), "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases={"use_bias": "attn_q"},
        epsilon=Number(LAYER_EPSILON, "norm_epsilon"),
    ),
}
