"""Small models whose states two ranks with memory of their own divide; their pages have few tokens."""

DELTA_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
SHAPES = {
    "qwen3-next": {"num_hidden_layers": 2, "full_attention_interval": 2, **DELTA_HEADS},
    "qwen3.5": {**DELTA_HEADS, "linear_value_head_dim": 8},
    "qwen3.5-moe": {**DELTA_HEADS, "linear_value_head_dim": 8},
    "falcon-h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "num_hidden_layers": 2},
    "granite-hybrid": {"mamba_d_state": 4},
    "granite-hybrid-dense": {"mamba_d_state": 8},
    "bamba": {"mamba_d_state": 8},
    "lfm2": {},
    "lfm2-moe": {},
    "nemotron-h": {"ssm_state_size": 8},
    "nemotron-h-moe": {"ssm_state_size": 8},
    "nemotron-h-latent": {"ssm_state_size": 8},
}
