"""A multi-token-prediction module: one more layer of a model, trained with it to guess (DeepSeek-V3, 2024; GLM-4.5).

At a position it takes what the model's head reads of the position, and the token of the next one. Its own output stands
for that at positions that the model has not computed: in Qwen3-Next behind the module's norm, else before it. It shares
the model's embedding and head. Its layer is one with attention.
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


@dataclass(frozen=True, slots=True)
class Naming:
    """What checkpoints of a family call a module's tensors, behind what all of these names begin with."""

    before: tuple[str, str]  # norms of the embedding and of the hidden state
    joining: str
    layer: str
    final_norm: str
    copies: tuple[str, ...] = ()  # of what the model has
    passes_normed: bool = False  # what stands for a hidden state is normed


_DEEPSEEK = Naming(
    ("enorm", "hnorm"), "eh_proj", "", "shared_head.norm", ("embed_tokens.weight", "shared_head.head.weight")
)
_QWEN = Naming(("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc", "layers.0.", "norm", passes_normed=True)
TARGETS = {  # families whose modules were tested
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
}


def prefix_of(config: ModelConfig) -> str:
    """Return what names of a module's tensors begin with: the first one's, which also guesses later tokens."""
    return config.design.guessing or f"model.layers.{config.num_layers}."


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
    passes_normed: bool
    lm_head: Linear
    rope: Rope

    def hidden(self, token_ids: Tensor, features: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Compute K and V of every position, and outputs of some: see `guessing_head.Head`."""
        ops, (of_embedding, of_feature) = self.ops, self.before
        embedded = ops.norm(ops.embed(token_ids, self.embedding), of_embedding)
        joined = ops.linear(torch.cat((embedded, ops.norm(features, of_feature)), -1), self.joining)
        made = self.layer.forward(ops, attention, 0, joined, rows)
        return ops.norm(made, self.final_norm) if self.passes_normed and len(made) else made

    def logits(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.passes_normed else self.ops.norm(hidden, self.final_norm)
        return self.ops.logits(normed, self.lm_head)

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
        of, naming, size = config.design, TARGETS[config.architecture], config.hidden_size
        place = max(place for place, attention in enumerate(of.attentions) if attention is not None)
        attention = of.attentions[place]
        assert attention is not None, "as chosen"
        parts = Parts(config, tensors, ops, rank, prefix_of(config))
        embedding, lm_head = shared
        before, behind = (parts.norm(name, of.head.norm) for name in naming.before)
        return cls(
            config=config,
            ops=ops,
            taps=behind_all(config.num_layers),
            embedding=embedding,
            before=(before, behind),
            joining=ops.held(tensors.take_matrix(f"{parts.prefix}{naming.joining}", size, 2 * size)),
            layer=build_layer(of.layers[place], replace(parts, prefix=f"{parts.prefix}{naming.layer}")),
            scores=attention.scores,
            final_norm=parts.norm(naming.final_norm, of.head.norm),
            passes_normed=naming.passes_normed,
            lm_head=lm_head,
            rope=ropes_of(config, tensors.device)[place],
        )
