"""How llama.cpp writes the families of which some layers keep states, and what their files leave to be known.

Which layers keep states is told by their tensors. Sources: as those of `gguf_families.py`. Free of numpy.
"""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_family import (
    CHOOSING,
    HEAD_NORMS,
    OF_GRANITE,
    RMS_EPSILON,
    SHARED_GATE,
    TOP_NAMES,
    Experts,
    GgufFamily,
    Number,
    Shapes,
    States,
    shared,
    without,
)
from pdserve.model.fields import Fields

BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # a list where layers differ, with 0 where they have none
SPACE_KEYS = tuple([f"ssm.{name}" for name in ("conv_kernel", "group_count", "inner_size", "state_size")])
SPACE_KEYS += ("ssm.time_step_rank",)
FULL, LINEAR = "full_attention", "linear_attention"
MORE = "nextn_predict_layers"  # layers that guess tokens, behind the others


def one_for_all_layers(values: Mapping[str, object], family: GgufFamily, prefix: str) -> dict[str, object]:
    """Return metadata with one number in place of a list by layer; ConfigError if layers differ in more than its lack.

    prefix: of the keys in the file.
    """
    found = dict(values)
    for key in BY_LAYER:
        given = values.get(key)
        if not isinstance(given, list):
            continue
        numbers = set(given) if family.states is None else set(given) - {0}
        if len(numbers) > 1 or not given:
            raise ConfigError(f"{prefix}{key}: {given!r} is not supported (one number in all layers that have it)")
        found[key] = max(given)
    return found


def state_config(fields: Fields, family: GgufFamily, shapes: Shapes) -> dict[str, object]:
    """Return what layers with states change. shapes: of the file's tensors."""
    if family.states is None:
        return {}
    count = fields.positive("block_count") - (fields.integer(MORE, 0) if family.states.may_guess else 0)
    config: dict[str, object] = {"num_hidden_layers": count}
    if family.states.kinds:
        config[family.states.kinds_key] = _kinds(shapes, family.states, count)
    return config


def _kinds(shapes: Shapes, states: States, count: int) -> list[str]:
    """Return what each layer is called; ConfigError for one of whose tensors none tells."""
    found = []
    for layer in range(count):
        kind = next((kind for part, kind in states.kinds.items() if f"blk.{layer}.{part}.weight" in shapes), None)
        if kind is None:
            raise ConfigError(f"blk.{layer}: the file has none of {', '.join(states.kinds)} of this layer")
        found.append(kind)
    return found


def _share(fields: Fields, key: str, whole: int, divisor: int) -> int:
    if whole % divisor:
        raise fields.unsupported(key, f"a divisor of {whole}")
    return whole // divisor


def _lfm2(fields: Fields, _: Shapes) -> dict[str, object]:
    return {"conv_L_cache": fields.positive("shortconv.l_cache"), "conv_bias": False, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(fields: Fields, _: Shapes) -> dict[str, object]:
    return {"conv_L_cache": fields.positive("shortconv.l_cache"), "conv_bias": False}


def _space(fields: Fields, shapes: Shapes) -> dict[str, object]:
    """Return the sizes of a state space."""
    heads = fields.positive("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": _share(fields, "ssm.time_step_rank", fields.positive("ssm.inner_size"), heads),
        "mamba_n_groups": fields.positive("ssm.group_count"),
        "mamba_d_state": fields.positive("ssm.state_size"),
        "mamba_d_conv": fields.positive("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in shapes),
    }


def _granite(fields: Fields, shapes: Shapes) -> dict[str, object]:
    if fields.flag("rope.scaling.finetuned", default=False):  # of Bamba, under this architecture
        raise fields.unsupported("rope.scaling.finetuned", "false: attention without rope")
    hidden = fields.positive("embedding_length")
    return {
        **_space(fields, shapes),
        "mamba_expand": _share(fields, "embedding_length", fields.positive("ssm.inner_size"), hidden),
        "shared_intermediate_size": fields.positive(
            "expert_shared_feed_forward_length", fields.integer("feed_forward_length")
        ),
        "num_local_experts": 0,
        "position_embedding_type": "nope",
    }


def _falcon(fields: Fields, shapes: Shapes) -> dict[str, object]:
    """Return it with no multipliers: the matrices have them."""
    if "output.weight" not in shapes:
        raise ConfigError("output.weight: the file has no such matrix, and its embeddings are multiplied by a factor")
    return {
        **_space(fields, shapes),
        "mamba_d_ssm": fields.positive("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in shapes,
        "mamba_norm_before_gate": False,
    }


def _nemotron(fields: Fields, shapes: Shapes) -> dict[str, object]:
    fields.optional_number("attention.layer_norm_epsilon")  # the converter writes it beside the one that counts
    space = _space(fields, shapes)
    return {
        "rope_parameters": None,
        "mamba_num_heads": space["mamba_n_heads"],
        "mamba_head_dim": space["mamba_d_head"],
        "n_groups": space["mamba_n_groups"],
        "ssm_state_size": space["mamba_d_state"],
        "conv_kernel": space["mamba_d_conv"],
        "use_conv_bias": space["mamba_conv_bias"],
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in shapes),
        "moe_latent_size": fields.optional_int("moe_latent_size"),
    }


def _delta(fields: Fields, _: Shapes) -> dict[str, object]:
    fields.skip("full_attention_interval")  # tensors tell
    fields.skip("rope.dimension_sections")  # of images
    heads = fields.positive("ssm.time_step_rank")
    return {
        "linear_num_key_heads": fields.positive("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.positive("ssm.state_size"),
        "linear_value_head_dim": _share(fields, "ssm.time_step_rank", fields.positive("ssm.inner_size"), heads),
        "linear_conv_kernel_dim": fields.positive("ssm.conv_kernel"),
    }


def _of_space(block: str) -> dict[str, str]:
    parts = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {part: f"{block}.{name}" for part, name in parts.items()}


def _bare_of_space(block: str) -> dict[str, str]:
    return {"ssm_a": f"{block}.A_log", "ssm_d": f"{block}.D", "ssm_dt": f"{block}.dt_bias"}


_LFM2_TOP = {**TOP_NAMES, "token_embd_norm": "model.embedding_norm"}
_LFM2_NAMES = {
    **without("attn_output"),
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_KINDS = {"shortconv.conv": "conv", "attn_q": FULL}
_LFM2_EPSILON = Number(RMS_EPSILON, "norm_eps")
_SHARED_MLP = {"gate": "shared_mlp.gate", "up": "shared_mlp.up", "down": "shared_mlp.output_linear"}
_NEMOTRON = GgufFamily(
    "NemotronHForCausalLM",
    {
        **_of_space("mixer"),
        **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
        "attn_norm": "norm",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    {**TOP_NAMES, "output_norm": "model.norm_f"},
    _bare_of_space("mixer"),
    epsilon=Number(RMS_EPSILON, "layer_norm_epsilon"),
    config=_nemotron,
    states=States(
        {"ssm_in": LINEAR, "attn_q": FULL, "ffn_up_exps": "moe", "ffn_up": "mlp"},
        kinds_key="layers_block_type",
        may_guess=True,
    ),
    interleaved=True,
    partial_rope=True,
)
_DELTA = GgufFamily(
    "Qwen3_5ForCausalLM",
    {
        **without("ffn_norm"),
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    bare_names={"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"},
    config=_delta,
    states=States({"ssm_out": LINEAR, "attn_q": FULL}, may_guess=True),
    partial_rope=True,
    norms_plus=1.0,
)
_QWEN_EXPERTS = Experts(
    "Qwen3_5MoeForCausalLM",
    "mlp",
    others={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    own={"norm_topk_prob": True},
)
_DELTA_MOE = replace(
    _DELTA,
    architecture="Qwen3_5MoeForCausalLM",
    names={**_DELTA.names, **shared("shared_expert"), SHARED_GATE: "mlp.shared_expert_gate"},
    experts=_QWEN_EXPERTS,
)

STATEFUL: Mapping[str, GgufFamily] = {  # by `general.architecture`
    "falcon-h1": GgufFamily(
        "FalconH1ForCausalLM",
        {
            **without("ffn_norm"),
            **_of_space("mamba"),
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        {**TOP_NAMES, "output_norm": "model.final_layernorm"},
        {**_bare_of_space("mamba"), "ffn_norm": "pre_ff_layernorm.weight"},  # which files have without `weight`
        config=_falcon,
        states=States(),
    ),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        {
            **without("ffn_gate", "ffn_up", "ffn_down"),
            **_of_space("mamba"),
            **{f"ffn_{part}": name for part, name in _SHARED_MLP.items()},
            **{f"ffn_{part}_shexp": name for part, name in _SHARED_MLP.items()},
        },
        bare_names=_bare_of_space("mamba"),
        numbers=OF_GRANITE,
        config=_granite,
        states=States({"ssm_in": "mamba", "attn_q": "attention"}),
        experts=Experts(
            "GraniteMoeHybridForCausalLM",
            "block_sparse_moe",
            count="num_local_experts",
            inner_size="intermediate_size",
            router="router.layer",
        ),
        joined={"shared_mlp.input_linear": ("shared_mlp.gate", "shared_mlp.up")},
        interleaved=True,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM", _LFM2_NAMES, _LFM2_TOP, epsilon=_LFM2_EPSILON, config=_lfm2, states=States(_LFM2_KINDS)
    ),
    "lfm2moe": GgufFamily(
        "Lfm2MoeForCausalLM",
        _LFM2_NAMES,
        _LFM2_TOP,
        {CHOOSING: "feed_forward.expert_bias"},
        epsilon=_LFM2_EPSILON,
        config=_lfm2_moe,
        states=States(_LFM2_KINDS),
        experts=Experts(
            "Lfm2MoeForCausalLM",
            "feed_forward",
            ("w1", "w3", "w2"),
            by_sigmoid=True,
            others={"leading_dense_block_count": "num_dense_layers"},
            own={"norm_topk_prob": True},
        ),
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        names={
            **_NEMOTRON.names,
            **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        bare_names={**_NEMOTRON.bare_names, CHOOSING: "mixer.gate.e_score_correction_bias"},
        experts=Experts(
            "NemotronHForCausalLM",
            "mixer",
            count="n_routed_experts",
            by_sigmoid=True,
            scaled=True,
            others={
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "expert_shared_count": "n_shared_experts",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            },
        ),
    ),
    "qwen3next": replace(
        _DELTA_MOE,
        architecture="Qwen3NextForCausalLM",
        names={**_DELTA_MOE.names, "ssm_ba": "linear_attn.in_proj_ba"},
        experts=replace(_QWEN_EXPERTS, architecture="Qwen3NextForCausalLM"),
        joined={"linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")},
    ),
    "qwen35": _DELTA,
    "qwen35moe": _DELTA_MOE,
}
