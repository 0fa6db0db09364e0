"""Small models with states, whose pages have few tokens."""

NEXT: dict[str, object] = {"num_hidden_layers": 2, "full_attention_interval": 2}
ONE_KEY_HEAD: dict[str, object] = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
WITHOUT_DELTA_NETS: dict[str, dict[str, object]] = {
    "falcon-h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "num_hidden_layers": 2},
    "granite-hybrid": {"mamba_d_state": 4},
    "granite-hybrid-dense": {"mamba_d_state": 8},
    "bamba": {"mamba_d_state": 8},
    "lfm2": {},
    "lfm2-moe": {},
    **{each: {"ssm_state_size": 8} for each in ("nemotron-h", "nemotron-h-moe", "nemotron-h-latent")},
}
ALONE = {  # whose states no ranks divide
    "qwen3-next": {**NEXT, **ONE_KEY_HEAD},
    "qwen3.5": ONE_KEY_HEAD,
    "qwen3.5-moe": ONE_KEY_HEAD,
    **WITHOUT_DELTA_NETS,
}
DELTA_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
SHAPES = {  # whose states two ranks with memory of their own divide
    "qwen3-next": {**NEXT, **DELTA_HEADS},
    **{each: {**DELTA_HEADS, "linear_value_head_dim": 8} for each in ("qwen3.5", "qwen3.5-moe")},
    **WITHOUT_DELTA_NETS,
}
