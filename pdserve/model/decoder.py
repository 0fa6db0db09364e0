"""A decoder-only transformer: embedding, layers, norm, head. What they are is in its `design`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.kernels.cpu.calls import Calls
from pdserve.kernels.cpu.experts import TiledExperts
from pdserve.model import design
from pdserve.model.attention import Attention
from pdserve.model.config import ModelConfig
from pdserve.model.family import TensorSource
from pdserve.model.layers import Layer, build_layer
from pdserve.model.mlp import CompiledExperts, Experts
from pdserve.model.ops import DeviceOps, Held, Linear, Norm, Ops, weight_bytes
from pdserve.model.ops_cpu import CompiledOps
from pdserve.model.parallel import Collective, vocab_parallel
from pdserve.model.parts import Parts
from pdserve.model.ranks import RankedOps
from pdserve.model.rope import Rope
from pdserve.model.taps import Tap
from pdserve.model.weights import WHOLE, Rank, Weights

EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"
ANGLES = "rotary_emb.inv_freq"  # checkpoints may hold them; they follow from the config
XIELU_CONSTANTS = {".mlp.act_fn.beta": 0.5, ".mlp.act_fn.eps": -1e-6}  # the values that are computed with
ROUNDED = 0.01  # share by which a file's constant may differ: it may be in bfloat16


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model; `family.Model` describes the methods."""

    config: ModelConfig
    rank: Rank
    ops: Ops
    embedding: Linear  # [vocab_size, hidden_size]
    embedding_scale: float
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    final_norm: Norm
    lm_head: Linear
    logit_scale: float
    logit_cap: float | None
    ranks: Collective | None = None  # where there are several

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.weight.device

    def forward(self, token_ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap | None = None) -> Tensor:
        hidden = self.hidden(token_ids, attention, rows, tap)
        return self.logits(hidden) if len(hidden) else hidden.new_empty((0, self.config.vocab_size))

    def hidden(self, token_ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap | None = None) -> Tensor:
        hidden = self.ops.embed(token_ids, self.embedding, self.embedding_scale)
        reads_all = tap is not None and tap.reads(len(self.layers))
        for index, layer in enumerate(self.layers):
            if tap is not None:
                tap.see(self.ops, index, hidden)
            wanted = rows if index == len(self.layers) - 1 and not reads_all else None
            hidden = layer.forward(self.ops, attention, index, hidden, wanted)
        if tap is None or not reads_all:
            return hidden
        tap.see(self.ops, len(self.layers), self.normed(hidden))
        return hidden if rows is None else hidden.index_select(0, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.logits(self.normed(hidden), self.lm_head, self.logit_scale, self.logit_cap)

    def normed(self, hidden: Tensor) -> Tensor:
        return self.ops.norm(hidden, self.final_norm)

    def matrices(self) -> Iterator[Held]:
        yield from (self.embedding, self.lm_head)
        for layer in self.layers:
            yield from layer.matrices()

    def expert_counts(self) -> list[Tensor]:
        mlps = [layer.mlp.experts if isinstance(layer.mlp, CompiledExperts) else layer.mlp for layer in self.layers]
        return [mlp.counts for mlp in mlps if isinstance(mlp, Experts | TiledExperts)]

    def activation_bytes(self) -> int:
        config = self.config
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        inner = 3 * max(layer.mlp.inner_size for layer in config.design.layers)
        mlps = (layer.mlp for layer in config.design.layers)
        made = (
            4
            * config.hidden_size
            * max((of.routing.num_chosen for of in mlps if isinstance(of, design.Experts)), default=0)
        )
        return (4 * config.hidden_size + heads + inner) * self.dtype.itemsize + made  # experts', in float32

    def bytes_read(self, num_rows: int) -> int:
        attentions = sum(weight_bytes(each) for layer in self.layers for each in layer.attention.matrices())
        mlps = sum(layer.mlp.bytes_read(num_rows) for layer in self.layers)
        embedded = weight_bytes(self.embedding) * num_rows // self.config.vocab_size
        return embedded + attentions + mlps + weight_bytes(self.lm_head)

    def through(self, calls: Calls) -> "Decoder":
        ops = CompiledOps(calls)
        return replace(self, ops=ops if self.ranks is None else RankedOps(ops, self.ranks.through(calls)))

    def among(self, ranks: Collective) -> "Decoder":
        """Return the same part of a model, which adds what it makes to what the other ranks make."""
        return replace(self, ops=RankedOps(self.ops, ranks), ranks=ranks)

    @classmethod
    def build(cls, config: ModelConfig, tensors: TensorSource, ops: DeviceOps, rank: Rank = WHOLE) -> Self:
        """Put a rank's part of a model together."""
        of, sizes, rows = config.design, (config.vocab_size, config.hidden_size), rank.rows()
        table = tensors.take_matrix(EMBEDDING, *sizes, shard=rows)
        embedding, head = ops.held_embedding(table, tied=config.tie_word_embeddings)
        parts = Parts(config, tensors, ops, rank)
        layers = tuple(
            build_layer(layer, replace(parts, prefix=f"model.layers.{index}.")) for index, layer in enumerate(of.layers)
        )
        head = head or ops.held(tensors.take_matrix(LM_HEAD, *sizes, bias=of.head.bias, shard=rows))
        return cls(
            config=config,
            rank=rank,
            ops=ops,
            embedding=vocab_parallel(embedding, rank, config.vocab_size),
            embedding_scale=_embedding_scale(of.embedding, tensors.dtype),
            layers=layers,
            ropes=ropes_of(config, tensors.device),
            final_norm=parts.norm(of.head.norm_name, of.head.norm),
            lm_head=vocab_parallel(head, rank, config.vocab_size),
            logit_scale=of.head.scale,
            logit_cap=of.head.soft_cap,
        )


def ignores(name: str, config: ModelConfig) -> bool:
    """Say whether checkpoints may hold a tensor of this name that the model does not read."""
    if name.endswith((ANGLES, *XIELU_CONSTANTS)):
        return True
    if config.design.guessing is not None and name.startswith(config.design.guessing):
        return True
    more = range(config.num_layers, config.num_layers + config.design.num_more_layers)
    if any(name.startswith(f"model.layers.{index}.") for index in more):
        return True
    return name == f"{LM_HEAD}.weight" and config.tie_word_embeddings


def check_constants(weights: Weights) -> None:
    """Raise ConfigError where a checkpoint holds another constant than the one that is computed with."""
    for name, stored in weights.items():
        for suffix, value in XIELU_CONSTANTS.items():
            if name.endswith(suffix):
                given = float(torch.as_tensor(stored.read(())))
                if not math.isclose(given, value, rel_tol=ROUNDED):
                    raise ConfigError(f"{name}: {given:g} is not supported, {value:g} is")


def _embedding_scale(of: design.Embedding, dtype: torch.dtype) -> float:
    return float(torch.tensor(of.scale, dtype=dtype)) if of.rounds_scale else of.scale


def ropes_of(config: ModelConfig, device: torch.device) -> tuple[Rope, ...]:
    """Return the rope of each layer; of one without attention, another's."""
    configs = [None if each is None else each.rope for each in config.design.attentions]
    ropes = {each: Rope(config.rope_dim, each, device) for each in dict.fromkeys(configs) if each is not None}
    return tuple(next(iter(ropes.values())) if each is None else ropes[each] for each in configs)
