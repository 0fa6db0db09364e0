"""The Llama family with Mistral, Qwen2 and Qwen3: the tensors of a checkpoint, and the forward pass.

A family is a file like this one, whose model is a `family.Model`. `shapes` names a checkpoint's tensors, `build` makes
a model of them, and `hidden` reads like the figure in the paper. `loading.FAMILIES` maps architectures to files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.model.config import ModelConfig
from pdserve.model.family import Shapes, Tensors
from pdserve.model.ops import Attention, DeviceOps, GateUp, Linear, Ops, QkNorm, joined
from pdserve.model.rope import Rope

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    qk_norm: QkNorm | None
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear | GateUp
    down: Linear


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the family; `family.Model` describes the methods."""

    config: ModelConfig
    ops: Ops
    embedding: Linear  # [vocab_size, hidden_size]
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Linear
    rope: Rope

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    def forward(self, token_ids: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        hidden = self.hidden(token_ids, attention, rows)
        return self.logits(hidden) if len(hidden) else hidden.new_empty((0, self.config.vocab_size))

    def hidden(self, token_ids: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        ops = self.ops
        hidden = ops.embed(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(ops.rms_norm(hidden, layer.input_norm), layer.qkv)
            mixed = attention.run(index, qkv.view(len(qkv), -1, self.config.head_dim), layer.qk_norm)
            if rows is not None and index == len(self.layers) - 1:
                if len(rows) == 0:
                    return hidden[:0]
                hidden, mixed = hidden.index_select(0, rows), mixed.index_select(0, rows)
            hidden = ops.linear_add(mixed, layer.o, hidden)
            gated = ops.swiglu(ops.rms_norm(hidden, layer.post_attention_norm), layer.gate_up)
            hidden = ops.linear_add(gated, layer.down, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.logits(self.ops.rms_norm(hidden, self.final_norm), self.lm_head)

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield from (self.embedding, self.lm_head)
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)

    def with_ops(self, ops: Ops) -> "Model":
        return replace(self, ops=ops)

    @classmethod
    def build(cls, config: ModelConfig, tensors: Tensors, ops: DeviceOps) -> "Model":
        tied = config.tie_word_embeddings
        embedding, head = ops.held_embedding(tensors.take_matrix(EMBEDDING), tied=tied)
        layers = tuple(
            _build_layer(config, f"model.layers.{index}.", tensors, ops) for index in range(config.num_layers)
        )
        return cls(
            config=config,
            ops=ops,
            embedding=embedding,
            layers=layers,
            final_norm=(final_norm := tensors.take(FINAL_NORM)),
            lm_head=head or ops.held(tensors.take_matrix(LM_HEAD)),
            rope=Rope(config, final_norm.device),
        )

    @staticmethod
    def shapes(config: ModelConfig) -> Shapes:
        shapes: Shapes = {f"{EMBEDDING}.weight": (config.vocab_size, config.hidden_size)}
        for index in range(config.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
        shapes[FINAL_NORM] = (config.hidden_size,)
        if not config.tie_word_embeddings:
            shapes[f"{LM_HEAD}.weight"] = (config.vocab_size, config.hidden_size)
        return shapes

    @staticmethod
    def ignores(name: str, config: ModelConfig) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (name == f"{LM_HEAD}.weight" and config.tie_word_embeddings)


def _build_layer(config: ModelConfig, prefix: str, tensors: Tensors, ops: DeviceOps) -> Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qk_norm = None
    if config.qk_norm:
        qk_norm = QkNorm(tensors.take(f"{attention}q_norm.weight"), tensors.take(f"{attention}k_norm.weight"))
    qkv = joined(*[tensors.take_matrix(f"{attention}{name}_proj") for name in "qkv"])
    return Layer(
        input_norm=tensors.take(f"{prefix}input_layernorm.weight"),
        qkv=ops.held(qkv),
        qk_norm=qk_norm,
        o=ops.held(tensors.take_matrix(f"{attention}o_proj")),
        post_attention_norm=tensors.take(f"{prefix}post_attention_layernorm.weight"),
        gate_up=ops.held_gate_up(tensors.take_matrix(f"{mlp}gate_proj"), tensors.take_matrix(f"{mlp}up_proj")),
        down=ops.held(tensors.take_matrix(f"{mlp}down_proj")),
    )


def _layer_shapes(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
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
