"""Decoder-only models of the Llama family: one forward pass over a step's tokens."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from pdserve.model.attention import Attention, QkNorm
from pdserve.model.config import ModelConfig
from pdserve.model.layers import Linear, Mlp, Norm
from pdserve.model.rope import Rope


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: Norm
    qkv: Linear
    qk_norm: QkNorm | None
    o: Linear
    post_attention_norm: Norm
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to run; its weights are never written again."""

    config: ModelConfig
    embedding: Tensor  # [vocab_size, hidden_size]; gives device and dtype
    layers: tuple[Layer, ...]
    final_norm: Norm
    lm_head: Linear
    rope: Rope

    def forward(self, token_ids: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """Compute K and V of every token, and logits of some.

        token_ids: int64 [num_tokens]. rows: the tokens whose logits are wanted, or None for all of them.
        Returns [len(rows), vocab_size] in the model's dtype.
        """
        hidden = embedding(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(hidden))
            mixed = attention.run(index, qkv.view(len(qkv), -1, self.config.head_dim), layer.qk_norm)
            if rows is not None and index == len(self.layers) - 1:
                if len(rows) == 0:
                    return hidden.new_empty((0, self.config.vocab_size))
                hidden, mixed = hidden.index_select(0, rows), mixed.index_select(0, rows)
            hidden = layer.o.plus(mixed, hidden)
            hidden = layer.mlp(layer.post_attention_norm(hidden), hidden)
        return self.lm_head(self.final_norm(hidden))
