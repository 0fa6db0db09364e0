"""EAGLE-3 heads as they are published: of random weights, and of weights that are right; and what one guesses.

`guesses_of` follows the paper (Li et al. 2025) and the published checkpoints, over whole sequences in plain torch.
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

Tensors = dict[str, Tensor]
EPS, THETA = 1e-5, 10000.0


def head_config(model: Mapping[str, Any], draft_vocab_size: int, layers: Seq[int], **own: object) -> dict[str, Any]:
    """Return the config.json of a head for the model with this config.json."""
    taken = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: model[key] for key in taken},
        "head_dim": head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "tie_word_embeddings": False,
        **own,
    }


def random_head(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Return tensors of a head, large enough that all of its inputs matter."""
    drawn = torch.Generator().manual_seed(seed)
    size, inner, count = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    wide, narrow = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=drawn) * 2 * inputs**-0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=drawn)

    chosen = torch.randperm(config["vocab_size"], generator=drawn)[:count].sort().values
    marked = torch.zeros(config["vocab_size"], dtype=torch.bool)
    marked[chosen] = True
    return {
        "d2t": chosen - torch.arange(count),
        "t2d": marked,
        "fc.weight": matrix(size, 3 * size),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(wide, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(narrow, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(narrow, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, wide),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": matrix(inner, size),
        "midlayer.mlp.up_proj.weight": matrix(inner, size),
        "midlayer.mlp.down_proj.weight": matrix(size, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(count, size),
    }


def head_for_few(config: Mapping[str, Any], model: Tensors, tokens: Seq[int]) -> Tensors:
    """Return the head that guesses what a model samples of a few tokens, if that depends on the last one alone.

    A position attends to positions of the same token, since queries are multiples of keys. Values are the embedding of
    the token that follows, of which one head has room for those of so many tokens as it is wide.
    """
    head = {name: torch.zeros_like(each) for name, each in random_head(config).items()}
    size, dim = config["hidden_size"], config["head_dim"]
    basis, _ = torch.linalg.qr(model["model.embed_tokens.weight"][list(tokens)].T)
    rows = torch.zeros(dim, size)
    rows[: len(tokens)] = basis.T
    head["midlayer.self_attn.q_proj.weight"][:dim, :size] = 40 * rows
    for name in "kv":
        head[f"midlayer.self_attn.{name}_proj.weight"][:dim, :size] = rows
    head["midlayer.self_attn.o_proj.weight"][:, :dim] = rows.T
    for name in ("midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        head[f"{name}.weight"] += 1
    head |= {"norm.weight": model["model.norm.weight"].clone(), "lm_head.weight": model["lm_head.weight"].clone()}
    return {name: each for name, each in head.items() if name not in ("d2t", "t2d")}


def write_head(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def guesses_of(
    config: Mapping[str, Any], head: Tensors, embedding: Tensor, states: Tensor, tokens: Seq[int], count: int
) -> list[int]:
    """Return the likeliest guesses of what follows tokens.

    embedding: the model's. states: [3, len(tokens) - 1, hidden_size], which the model has of all tokens but the last.
    """
    feature, following = linear(torch.cat(tuple(states), -1), head["fc.weight"]), list(tokens[1:])
    guesses: list[int] = []
    while len(guesses) < count:
        output = _outputs(config, head, embedding[following], feature)[-1:]
        draft_id = int(linear(_normed(output, head["norm.weight"]), head["lm_head.weight"])[0].argmax())
        guesses.append(draft_id + int(head["d2t"][draft_id]))
        feature, following = torch.cat((feature, output)), [*following, guesses[-1]]
    return guesses


def _outputs(config: Mapping[str, Any], head: Tensors, embedded: Tensor, feature: Tensor) -> Tensor:
    """Return the layer's output at each position, in front of its last norm."""
    layer = {name.removeprefix("midlayer."): each for name, each in head.items()}
    normed = _normed(feature, layer["hidden_norm.weight"])
    x = torch.cat((_normed(embedded, layer["input_layernorm.weight"]), normed), -1)
    dim, groups = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    q, k, v = (linear(x, layer[f"self_attn.{name}_proj.weight"]).view(len(x), -1, dim) for name in "qkv")
    q, k = (_rotated(each) for each in (q, k))
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    residual = normed if config.get("norm_before_residual") else feature
    hidden = residual + linear(attended, layer["self_attn.o_proj.weight"])
    x = _normed(hidden, layer["post_attention_layernorm.weight"])
    inner = silu(linear(x, layer["mlp.gate_proj.weight"])) * linear(x, layer["mlp.up_proj.weight"])
    return hidden + linear(inner, layer["mlp.down_proj.weight"])


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rotated(x: Tensor) -> Tensor:
    """Rotate the two halves of each head by its position: [num_positions, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * THETA ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)
