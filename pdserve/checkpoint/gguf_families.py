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

RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_ATTENTION, _MLP = {"attention_bias": "attn_q"}, {"mlp_bias": "ffn_gate"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number in the metadata that Hugging Face's config has, too."""

    key: str
    name: str  # in config.json
    default: float | None = None  # None: the file must have it


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What the files of one architecture hold."""

    architecture: str  # Hugging Face's
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)  # of the parts of a layer
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    biases: Mapping[str, str] = field(default_factory=dict)  # flags of config.json, each with a part that has a bias
    epsilon: Number = field(default_factory=lambda: Number(RMS_EPSILON, "rms_norm_eps"))
    numbers: tuple[Number, ...] = ()
    windowed: str | None = None  # Hugging Face's architecture of a file with a window; None: such a file is refused
    interleaved: bool = (
        False  # rows of q and k that turn together lie side by side, and on Hugging Face half a head apart
    )
    partial_rope: bool = False  # a part of each head may turn
    long_rope: bool = False  # the file may have factors for short and for long contexts
    norms_plus: float = 0.0  # what norms in the file have on top of Hugging Face's
    xielu: bool = False  # the metadata have scalars of each layer's activation


def _without(*parts: str) -> dict[str, str]:
    return {part: name for part, name in LAYER_NAMES.items() if part not in parts}


_FUSED_MLP = {**_without("ffn_gate"), "ffn_up": "mlp.gate_up_proj"}
_LLAMA = GgufFamily("LlamaForCausalLM", biases=_ATTENTION | _MLP, interleaved=True)

FAMILIES: Mapping[str, GgufFamily] = {  # by `general.architecture`
    "llama": replace(_LLAMA, windowed="MistralForCausalLM"),
    "qwen2": GgufFamily("Qwen2ForCausalLM", biases=_ATTENTION | _MLP),
    "qwen3": GgufFamily("Qwen3ForCausalLM", LAYER_NAMES | _HEAD_NORMS, biases=_ATTENTION | _MLP),
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
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", biases={"use_bias": "attn_q"}),
    "gemma": GgufFamily("GemmaForCausalLM", biases=_ATTENTION, norms_plus=1.0),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        {**_FUSED_MLP, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        biases=_ATTENTION,
        partial_rope=True,
    ),
    "granite": replace(
        _LLAMA,
        architecture="GraniteForCausalLM",
        numbers=(
            Number("attention.scale", "attention_multiplier"),
            Number("embedding_scale", "embedding_multiplier", 1.0),
            Number("logit_scale", "logits_scaling"),
            Number("residual_scale", "residual_multiplier", 1.0),
        ),
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
        {
            **_without("attn_norm", "ffn_norm"),
            **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        biases=_ATTENTION,
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
            "attn_qkv": "self_attn.qkv_proj",
            **{part: name for part, name in _FUSED_MLP.items() if part not in ("attn_q", "attn_k", "attn_v")},
        },
        windowed="Phi3ForCausalLM",
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
