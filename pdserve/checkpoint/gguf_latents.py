"""What files of models with latent attention (DeepSeek-V2 and V3, architecture deepseek2) say in their own way.

Newer files have the matrix that expands latents in two parts, of keys and of values, and describe the absorbed form:
one KV head. Older ones have it whole, and describe heads. Sources: `conversion/deepseek.py` and
`src/models/deepseek2.cpp` in https://github.com/ggml-org/llama.cpp. Free of numpy.
"""

from collections.abc import Collection

from pdserve.model.fields import Fields

SOFTMAX, SIGMOID = 1, 2  # how experts are scored
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Groups of experts, and how many of them a token chooses from, by the number of experts. Files of older converters do
# not say; others than DeepSeek's own models have no groups.
USUAL_GROUPS = {160: (8, 3), 256: (8, 4)}


def latent_config(fields: Fields, names: Collection[str]) -> dict[str, object]:
    """Return what the config.json has beside that of other families, with the names of experts. names: of tensors."""
    turning, count = fields.positive("rope.dimension_count"), fields.positive("expert_count")
    given = "attention.key_length", "attention.value_length"
    key, value = (fields.positive(each) for each in given)  # of the absorbed form, if the file has the next two
    key, value = (fields.positive(f"{each}_mla", old) for each, old in zip(given, (key, value), strict=True))
    is_scored = any(name.endswith("exp_probs_b.bias") for name in names)
    fields.must_be("expert_gating_func", SOFTMAX, SIGMOID)
    by_sigmoid = fields.integer("expert_gating_func", SIGMOID if is_scored else SOFTMAX) == SIGMOID
    usual = USUAL_GROUPS.get(count, (1, 1))
    num_groups = fields.positive("expert_group_count", usual[0])
    rest = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if not by_sigmoid:
        rest = {"scoring_func": "softmax", "topk_method": "greedy" if num_groups == 1 else "group_limited_greedy"}
    return {
        **rest,
        "architectures": ["DeepseekV3ForCausalLM" if by_sigmoid else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": fields.positive("attention.head_count"),
        "q_lora_rank": fields.optional_int("attention.q_lora_rank"),
        "kv_lora_rank": fields.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
        "n_group": num_groups,
        "topk_group": fields.positive("expert_group_used_count", usual[1]),
    }


def with_magnitude(rope: dict[str, object], fields: Fields) -> dict[str, object]:
    """Return a rope with what YaRN multiplies scores with, which files have as a tenth of `mscale_all_dim`."""
    if rope["rope_type"] != "yarn":
        return rope
    of_all = 10.0 * fields.number(LOG_MULTIPLIER)
    return {**rope, "mscale": of_all, "mscale_all_dim": of_all}  # the converter takes them to be equal
