"""EAGLE-3 heads as they are published: of random weights, and of weights that are right; and what one guesses.

`guesses_of` follows the paper (Li et al. 2025) and the published checkpoints, over whole sequences in plain torch.
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from model_zoo import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, normalize, silu

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


def write_forgetful_model(folder: Path, remembered: float = 0.0) -> Tensors:
    """Write a Llama whose next token depends on the last one alone, and return its tensors.

    remembered: weight of what layers add; a tenth changes some of the tokens.
    All embeddings have the same length in the part that a head of attention sees, so each is nearest to itself there.
    """
    file = write_model("llama3", folder) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(remembered)
    embedding, dim = tensors["model.embed_tokens.weight"], len(tensors["model.layers.0.self_attn.k_proj.weight"]) // 2
    embedding.copy_(normalize(embedding.view(len(embedding), -1, dim), dim=-1).flatten(1))
    save_file(tensors, file, {"format": "pt"})
    return tensors


def longest_walks(model: Tensors, count: int) -> list[list[int]]:
    """Return tokens as a forgetful model continues them, likeliest first, until one would be there twice."""
    normed = _normed(model["model.embed_tokens.weight"], model["model.norm.weight"])
    following, walks = linear(normed, model["lm_head.weight"]).argmax(-1).tolist(), list[list[int]]()
    for start in range(len(following)):
        walks.append([start])
        while (token := following[walks[-1][-1]]) not in walks[-1]:
            walks[-1].append(token)
    return sorted(walks, key=len)[-count:]


def head_that_looks_back(config: Mapping[str, Any], model: Tensors) -> Tensors:
    """Return the head that guesses what followed the same token before, beside a forgetful model with two KV heads.

    Keys are of the feature, which is the embedding of the position's own token. Queries and values are of the token
    that follows. Outputs lie where keys do not look. So without KV of earlier tokens, no guess is right.
    """
    head = {name: torch.zeros_like(each) for name, each in random_head(config).items()}
    size, dim = config["hidden_size"], config["head_dim"]
    near = torch.ones(dim, 1)
    near[:: dim // 2] = 0  # what rope turns by a whole angle a token; at a large theta it hardly turns others
    head["fc.weight"][:, :size] = torch.eye(size)
    for place in range(2):
        query, own = place * config["num_attention_heads"] // 2 * dim, slice(place * dim, place * dim + dim)
        part, behind = torch.eye(size)[own], size // 2 + place * dim
        head["midlayer.self_attn.q_proj.weight"][query : query + dim, :size] = 40 * near * part
        head["midlayer.self_attn.k_proj.weight"][own, size:] = 100 * near * part
        head["midlayer.self_attn.v_proj.weight"][own, :size] = part
        head["midlayer.self_attn.o_proj.weight"][behind : behind + dim, query : query + dim] = torch.eye(dim)
    for name in ("midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        head[f"{name}.weight"] += 1
    head["midlayer.hidden_norm.weight"] += 0.01  # so much of the position's own token is left in the output
    head["lm_head.weight"][:, size // 2 :] = model["model.embed_tokens.weight"][:, : size // 2]
    return {name: each for name, each in head.items() if name not in ("d2t", "t2d")}


def write_head_that_looks_back(folder: Path, model_folder: Path, model: Tensors) -> Path:
    raw = json.loads((model_folder / "config.json").read_text())
    config = head_config(raw, raw["vocab_size"], (0, 1, 2), norm_before_residual=True, rope_theta=1e30)
    return write_head(folder, config, head_that_looks_back(config, model))


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


def random_head_beside(model: Path) -> dict[str, object]:
    """Write a head of random weights that reads three layers' inputs; return what guesses with it."""
    config = head_config(json.loads((model / "config.json").read_text()), 200, (0, 1, 2))
    return {"method": "eagle3", "model": str(write_head(model / "head", config, random_head(config)))}
