"""An EAGLE-3 head: one layer that guesses what follows a token from features of the model and the token after it.

At a position it takes the feature of the position and the token of the next one. Its own output is the feature of the
positions that the model has not computed (Li et al. 2025, arXiv 2503.01840).
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pdserve.model import design
from pdserve.model.attention import Attention
from pdserve.model.config import ModelConfig
from pdserve.model.eagle3_config import HeadConfig
from pdserve.model.family import TensorSource
from pdserve.model.layers import SelfAttention
from pdserve.model.mlp import Mlp, build_mlp
from pdserve.model.ops import DeviceOps, Linear, Norm, Ops
from pdserve.model.parallel import Collective, vocab_parallel
from pdserve.model.parts import Parts
from pdserve.model.ranks import RankedOps
from pdserve.model.rope import Rope
from pdserve.model.taps import Taps
from pdserve.model.weights import WHOLE, Rank

LAYER = "midlayer."
EMBEDDING, LM_HEAD = "embed_tokens", "lm_head"


def feature_part(place: int) -> str:
    """Return the name of the part of `fc` that multiplies the hidden states before one of the layers."""
    return f"fc.{place}"


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """A head, loaded."""

    config: ModelConfig
    ops: Ops
    taps: Taps
    embedding: Linear  # [vocab_size, hidden_size]
    before_attention: tuple[Norm, Norm]  # of embedding and feature
    attention: SelfAttention
    before_mlp: Norm
    mlp: Mlp
    norms_residual: bool
    final_norm: Norm
    lm_head: Linear  # [draft_vocab_size, hidden_size]
    token_ids: Tensor  # int64 [draft_vocab_size]: the model's tokens
    rope: Rope
    scores: design.Scores

    def hidden(self, token_ids: Tensor, features: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Compute K and V of every position, and outputs of some: see `guessing_head.Head`."""
        ops, (of_embedding, of_feature) = self.ops, self.before_attention
        embedded, normed = ops.norm(ops.embed(token_ids, self.embedding), of_embedding), ops.norm(features, of_feature)
        mixed = self.attention.mixed(ops, attention, 0, torch.cat((embedded, normed), -1))
        if len(rows) == 0:
            return features[:0]
        residual = (normed if self.norms_residual else features).index_select(0, rows)
        hidden = ops.linear_add(mixed.index_select(0, rows), self.attention.o, residual)
        return self.mlp.forward(ops, ops.norm(hidden, self.before_mlp), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the model's vocabulary: [num_rows, vocab_size]; -inf where the head has no such token."""
        own = self.ops.logits(self.ops.norm(hidden, self.final_norm), self.lm_head)
        every = own.new_full((len(own), self.config.vocab_size), -torch.inf)
        return every.index_copy_(1, self.token_ids, own)

    def among(self, ranks: Collective) -> "Eagle3Head":
        """Return the same part of a head, which computes with the other ranks."""
        return replace(self, ops=RankedOps(self.ops, ranks))

    @classmethod
    def build(
        cls,
        of: HeadConfig,
        tensors: TensorSource,
        ops: DeviceOps,
        token_ids: Tensor,
        embedding: Linear | None,
        rank: Rank = WHOLE,
    ) -> Self:
        """Put a rank's part of a head together. embedding: the model's; None: the head has its own."""
        config, parts = of.model, Parts(of.model, tensors, ops, rank)
        in_layer, size = replace(parts, prefix=LAYER), config.hidden_size
        (layer,) = config.design.layers
        assert isinstance(layer, design.Sequential), "a Llama's"
        assert isinstance(layer.attention, design.SelfAttention), "a Llama's"
        assert layer.mlp is not None, "a Llama's"
        if embedding is None:
            taken = tensors.take_matrix(EMBEDDING, config.vocab_size, size, shard=rank.rows())
            embedding = vocab_parallel(ops.held_embedding(taken, tied=False)[0], rank, config.vocab_size)
        own = tensors.take_matrix(LM_HEAD, of.draft_vocab_size, size, shard=rank.rows())
        fc = [ops.held(tensors.take_matrix(feature_part(place), size, size)) for place in range(len(of.layers))]
        return cls(
            config=config,
            ops=ops,
            taps=tuple(zip(of.layers, fc, strict=True)),
            embedding=embedding,
            before_attention=(in_layer.norm("input_layernorm", layer.norm), in_layer.norm("hidden_norm", layer.norm)),
            attention=SelfAttention.build(replace(layer.attention, num_inputs=2), in_layer),
            before_mlp=in_layer.norm("post_attention_layernorm", layer.norm),
            mlp=build_mlp(f"{LAYER}mlp.", layer.mlp, size, tensors, ops, rank),
            norms_residual=of.norms_residual,
            final_norm=parts.norm("norm", layer.norm),
            lm_head=vocab_parallel(ops.held(own), rank, of.draft_vocab_size),
            token_ids=token_ids,
            rope=Rope(config.head_dim, layer.attention.rope, tensors.device),
            scores=layer.attention.scores,
        )
