"""Reads the config.json of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840). Free of torch.

There are two forms: a Llama's config with more keys, and that of the `speculators` library, which has a Llama's within.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pdserve.base.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields

ARCHITECTURES = (  # by which published heads go; some call themselves what their layer is
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLM",
)
# Families of models that a head was tested with.
TARGETS = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
)
NUM_FEATURES = 3  # layers whose hidden states a head reads
_LAYER = "transformer_layer_config"
_OWN = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
_NEUTRAL: Mapping[str, object] = {  # the values with which a head is the published one
    "norm_before_fc": False,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "use_sliding_window": False,
}
_INERT = (  # of training, of other servers, or repeated elsewhere
    *(_LAYER, "architectures", "eagle_config", "speculators_config", "speculators_model_type", "speculators_version"),
    *("model_type", "auto_map", "embed_requires_grad", "has_no_defaults_at_init", "tie_word_embeddings", "torch_dtype"),
    *("dtype", "transformers_version", "base_model_ep_plan", "max_window_layers"),
)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head of one layer, for one model."""

    model: ModelConfig  # of the layer; its vocabulary is the model's
    draft_vocab_size: int
    layers: tuple[int, ...]  # of the model: the hidden states before them are read
    norms_residual: bool  # what attention adds to is the feature behind its norm, not before it


def read_head(config: Mapping[str, object], target: ModelConfig) -> HeadConfig:
    """Read a head's config; ConfigError names the key that does not fit the model that it guesses for."""
    outer = Fields(config)
    names = outer.texts("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise outer.unsupported("architectures", f"one of {', '.join(ARCHITECTURES)}")
    if target.architecture not in TARGETS:
        raise ConfigError(f"heads were tested with {', '.join(TARGETS)}, and not with {target.architecture}")
    inner, more = config.get(_LAYER), config.get("eagle_config")
    given = {**config, **(more if isinstance(more, Mapping) else {})}
    fields = Fields(given)
    for key, value in _NEUTRAL.items():
        fields.must_be(key, value)
    fields.must_be("num_hidden_layers", 1)
    layer = dict(inner) if isinstance(inner, Mapping) else _without(given)
    unknown = [key for key in _without(config) if isinstance(inner, Mapping) and key not in _INERT]
    if unknown:
        raise outer.unsupported(unknown[0], "a key of the layer, within transformer_layer_config")
    model = ModelConfig.from_hf({**layer, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False})
    head = HeadConfig(
        model=model,
        draft_vocab_size=fields.positive("draft_vocab_size", model.vocab_size),
        layers=_layers(fields, target.num_layers),
        norms_residual=fields.flag("norm_before_residual", default=isinstance(inner, Mapping)),
    )
    _check_fits(head, fields.positive("target_hidden_size", target.hidden_size), target)
    return head


def _without(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys that are the layer's."""
    return {key: value for key, value in config.items() if key not in (*_OWN, *_NEUTRAL, *_INERT)}


def _layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return before which layers of the model hidden states are read.

    Published numbers mean "before the layer", as in EAGLE's code, or "after it". Those that begin with 1 are of the
    second kind: nobody reads the states before the second layer (sgl-project/sglang, pull request 25454).
    """
    key = "eagle_aux_hidden_state_layer_ids"
    given = layers = fields.integers(key) or (2, num_layers // 2, num_layers - 3)
    if layers[0] == 1:
        layers = tuple(layer + 1 for layer in layers)
    rises = all(one < other for one, other in pairwise(layers))
    if len(layers) != NUM_FEATURES or not rises or layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError(f"{key}: {list(given)} are not {NUM_FEATURES} rising numbers of {num_layers} layers")
    return layers


def _check_fits(head: HeadConfig, target_hidden_size: int, target: ModelConfig) -> None:
    """Raise ConfigError unless a head reads what the model has, and their KV has the same shape."""
    model = head.model
    compared = {
        "num_hidden_layers": (model.num_layers, 1),
        "hidden_size": (model.hidden_size, target.hidden_size),
        "target_hidden_size": (target_hidden_size, target.hidden_size),
        "vocab_size": (model.vocab_size, target.vocab_size),
        "num_key_value_heads": (model.num_kv_heads, target.num_kv_heads),
        "head_dim": (model.head_dim, target.head_dim),
    }
    for key, (given, wanted) in compared.items():
        if given != wanted:
            raise ConfigError(f"{key}: {given}, and the model that it guesses for asks for {wanted}")
    if head.draft_vocab_size > model.vocab_size:
        raise ConfigError(f"draft_vocab_size: {head.draft_vocab_size} is over vocab_size {model.vocab_size}")
