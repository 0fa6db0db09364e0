"""Text parts of models that also see images: which config and which tensors a text model would have. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.base.errors import ConfigError
from pdserve.model.fields import Fields
from pdserve.model.weights import Weights

TEXT = "text_config"
OVERRIDING = ("bos_token_id", "dtype", "eos_token_id", "tie_word_embeddings", "torch_dtype")  # of a whole model
PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
}  # of the text part's tensors, and what they become
OTHERS = (
    "vision_model.",
    "vision_tower.",
    "visual.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
)  # of tensors of the other parts, after `model.` or without it


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How the configs of one architecture hold that of a text model."""

    text_parts: Mapping[str, str]  # architectures by the text part's `model_type`
    keys: tuple[str, ...]  # of the other parts
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the text part's keys


OF_QWEN = ("image_token_id", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id")
WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        {"gemma3_text": "Gemma3ForCausalLM"},
        ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"),
        {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
    "Gemma4ForConditionalGeneration": Wrapper(
        {"gemma4_text": "Gemma4ForCausalLM"},
        (
            *("audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index"),
            *("eoi_token_id", "image_token_id", "video_token_id", "vision_config", "vision_soft_tokens_per_image"),
        ),
    ),
    "Llama4ForConditionalGeneration": Wrapper(
        {"llama4_text": "Llama4ForCausalLM"},
        ("boi_token_index", "eoi_token_index", "image_token_index", "vision_config"),
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper({"qwen3_5_text": "Qwen3_5ForCausalLM"}, OF_QWEN),
    "Qwen3_5MoeForConditionalGeneration": Wrapper({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, OF_QWEN),
    "Mistral3ForConditionalGeneration": Wrapper(
        {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
        (
            *("image_token_index", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
            *("vision_config", "vision_feature_layer"),
        ),
    ),
}


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config of a model's text part; the config itself where it has no other part.

    ConfigError names a key that is not known, or a text part that is not served.
    """
    fields = Fields(config)
    names = fields.texts("architectures")
    wrapper = WRAPPERS.get(names[0]) if len(names) == 1 else None
    if wrapper is None:
        return config
    inner = config.get(TEXT)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{TEXT}: missing from the model's config")
    kind = fields.section(TEXT).text("model_type", next(iter(wrapper.text_parts)))
    if kind not in wrapper.text_parts:
        raise ConfigError(f"{TEXT}.model_type: {kind!r} is not supported ({' or '.join(wrapper.text_parts)})")
    own = {key: config[key] for key in OVERRIDING if config.get(key) is not None}
    known = {"architectures", TEXT, *wrapper.keys, *OVERRIDING}
    rest = {key: value for key, value in config.items() if key not in known}  # which the text part's reader checks
    return {**wrapper.defaults, **rest, **inner, **own, "architectures": [wrapper.text_parts[kind]]}


def text_tensors(weights: Weights, config: Mapping[str, object]) -> Weights:
    """Return the tensors of a model's text part, by the names that a text model's have. config: as it was read."""
    if text_config(config) is config:
        return weights
    found = {}
    for name, stored in weights.items():
        if name.removeprefix("model.").startswith(OTHERS):
            continue
        old = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        found[PREFIXES.get(old, "") + name.removeprefix(old)] = stored
    return found
