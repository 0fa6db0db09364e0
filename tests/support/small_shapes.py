"""Shapes of small models, by the keys of `config.json`."""

SMALL: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "eos_token_id": 5,
}
FOUR_HEADS: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN_3: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], **FOUR_HEADS}
LATENTS: dict[str, object] = {  # of heads that share a row, in a layer without experts and one with them
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 16,
    "head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 64,
}
DELTA_NET: dict[str, object] = {  # in one of two layers
    "architectures": ["Qwen3_5ForCausalLM"],
    **FOUR_HEADS,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
}
MISTRAL: dict[str, object] = {
    "architectures": ["MistralForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 24,
}
