"""GPT-OSS (OpenAI 2025): experts, a sink for each head, and a window in every other layer."""

from pdserve.kernels.routing import Routing
from pdserve.model.design import (
    Activation,
    Design,
    Experts,
    GatedMlp,
    Head,
    RmsNorm,
    Scores,
    SelfAttention,
    Sequential,
    Stacked,
)
from pdserve.model.families.experts import num_chosen, num_experts, pass_over_training
from pdserve.model.families.reading import Family, activation, layers_by_window, require, windows
from pdserve.model.fields import Fields
from pdserve.model.rope_config import read_rope


def _read(fields: Fields) -> Design:
    pass_over_training(fields)
    activation(fields, Activation.SILU)  # which the config names; `SWIGLU_OAI` is computed
    require(fields, swiglu_alpha=1.702, swiglu_limit=7.0)
    count, bias = num_experts(fields, "num_local_experts", 128), fields.flag("attention_bias", default=True)
    chosen = num_chosen(fields, count, 4)
    require(fields, experts_per_token=chosen)
    fields.optional_int("initial_context_length")  # which the rope says, too
    experts = Experts(
        count,
        GatedMlp(fields.positive("intermediate_size"), Activation.SWIGLU_OAI, bias=True),
        Routing(chosen),
        router="router",
        router_bias=True,
        stacked=Stacked("experts.gate_up_proj", "experts.down_proj", inputs_first=True, alternating=True),
    )
    attention = SelfAttention(read_rope(fields), bias, bias, scores=Scores(has_sinks=True))
    layer = Sequential(attention, experts, RmsNorm(fields.number("rms_norm_eps", 1e-5)))
    layers = layers_by_window(windows(fields, lambda index: index % 2 == 0), layer, layer)
    return Design(layers, Head(layer.norm))


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "rope_theta": 150000.0}
GPT_OSS = Family(_read, {**DEFAULTS, "rope_scaling": YARN})
