"""Which tensors a Hugging Face checkpoint of the family holds, and their shapes."""

from pdserve.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def hf_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor the model needs, in the order checkpoints hold them."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        prefix = layer_prefix(index)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Say whether checkpoints may hold a tensor of this name that the model does not read."""
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and config.tie_word_embeddings)


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, out_features, in_features, has_bias in (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes
