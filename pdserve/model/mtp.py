"""A multi-token-prediction module: one more layer of a model, trained with it to guess (DeepSeek-V3, 2024; GLM-4.5).

At a position it takes what the model's head reads of the position, and the token of the next one. Its own output stands
for that at positions that the model has not computed. It shares the model's embedding and head.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from pdserve.model import design
from pdserve.model.attention import Attention
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import ropes_of
from pdserve.model.family import TensorSource
from pdserve.model.layers import Layer, build_layer
from pdserve.model.ops import DeviceOps, Linear, Norm, Ops
from pdserve.model.parallel import Collective
from pdserve.model.parts import Parts
from pdserve.model.ranks import RankedOps
from pdserve.model.rope import Rope
from pdserve.model.taps import Taps, behind_all
from pdserve.model.weights import WHOLE, Rank

TARGETS = (  # families whose modules were tested
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's, by their names in the module


def prefix_of(config: ModelConfig) -> str:
    """Return what names of a module's tensors begin with: the first one's, which also guesses later tokens."""
    return f"model.layers.{config.num_layers}."


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A module, loaded."""

    config: ModelConfig
    ops: Ops
    taps: Taps
    embedding: Linear
    before: tuple[Norm, Norm]  # of embedding and hidden state
    joining: Linear  # [hidden_size, 2 * hidden_size]
    layer: Layer
    scores: design.Scores
    final_norm: Norm
    lm_head: Linear
    rope: Rope

    def hidden(self, token_ids: Tensor, features: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Compute K and V of every position, and outputs of some: see `guessing_head.Head`."""
        ops, (of_embedding, of_feature) = self.ops, self.before
        embedded = ops.norm(ops.embed(token_ids, self.embedding), of_embedding)
        joined = ops.linear(torch.cat((embedded, ops.norm(features, of_feature)), -1), self.joining)
        return self.layer.forward(ops, attention, 0, joined, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.logits(self.ops.norm(hidden, self.final_norm), self.lm_head)

    def among(self, ranks: Collective) -> "MtpHead":
        """Return the same part of a module, which computes with the other ranks."""
        return replace(self, ops=RankedOps(self.ops, ranks))

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        tensors: TensorSource,
        ops: DeviceOps,
        shared: tuple[Linear, Linear],
        rank: Rank = WHOLE,
    ) -> Self:
        """Put a rank's part of a module together. shared: the model's embedding and head."""
        parts, layer = Parts(config, tensors, ops, rank, prefix_of(config)), config.design.layers[-1]
        attention, norm, size = config.design.attentions[-1], config.design.head.norm, config.hidden_size
        assert attention is not None, "these families have no other layers"
        embedding, lm_head = shared
        return cls(
            config=config,
            ops=ops,
            taps=behind_all(config.num_layers),
            embedding=embedding,
            before=(parts.norm("enorm", norm), parts.norm("hnorm", norm)),
            joining=ops.held(tensors.take_matrix(f"{parts.prefix}eh_proj", size, 2 * size)),
            layer=build_layer(layer, parts),
            scores=attention.scores,
            final_norm=parts.norm("shared_head.norm", norm),
            lm_head=lm_head,
            rope=ropes_of(config, tensors.device)[-1],
        )
