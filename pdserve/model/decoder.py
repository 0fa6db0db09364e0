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
from pdserve.model.beside_experts import BesideExperts
from pdserve.model.config import ModelConfig, heads_of
from pdserve.model.family import TensorSource
from pdserve.model.latent_experts import LatentExperts
from pdserve.model.layer_inputs import LayerInputs, token_bytes
from pdserve.model.layers import Layer, build_layer
from pdserve.model.mlp import CompiledExperts, Experts
from pdserve.model.ops import DeviceOps, Held, Linear, Norm, Ops, weight_bytes
from pdserve.model.ops_cpu import CompiledOps
from pdserve.model.parallel import Collective, vocab_parallel
from pdserve.model.parts import Parts
from pdserve.model.ranks import RankedOps
from pdserve.model.rope import Rope
from pdserve.model.stages import Stages
from pdserve.model.taps import Tap
from pdserve.model.weights import WHOLE, Rank, Weights

EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"
SHARED_MATRICES = (EMBEDDING, LM_HEAD)  # with a module that guesses
ANGLES = "rotary_emb.inv_freq"  # checkpoints may hold them; they follow from the config
XIELU_CONSTANTS = {".mlp.act_fn.beta": 0.5, ".mlp.act_fn.eps": -1e-6}  # the values that are computed with
UNREAD = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")  # of layers that read keys and values of others
ROUNDED = 0.01  # share by which a file's constant may differ: it may be in bfloat16


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model; `family.Model` describes the methods."""

    config: ModelConfig
    rank: Rank
    ops: Ops
    embedding: Linear | None  # [vocab_size, hidden_size]; None: an earlier pipeline stage has it
    embedding_scale: float
    layers: tuple[Layer, ...]  # of the rank's stage
    ropes: tuple[Rope, ...]
    final_norm: Norm
    lm_head: Linear | None  # None: the last stage has it
    logit_scale: float
    logit_cap: float | None
    layer_inputs: LayerInputs | None = None
    ranks: Collective | None = None  # where there are several
    stages: Stages | None = None  # likewise

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.weight.device

    def forward(self, token_ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap | None = None) -> Tensor:
        hidden = self.hidden(token_ids, attention, rows, tap)
        has_logits = self.rank.is_last and len(hidden) > 0
        return self.logits(hidden) if has_logits else hidden.new_empty((0, self.config.vocab_size))

    def hidden(self, token_ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap | None = None) -> Tensor:
        hidden, num_layers = self._entering(token_ids), self.config.num_layers
        reads_all = tap is not None and tap.reads(num_layers)
        own = None if self.layer_inputs is None else self.layer_inputs.rows(self.ops, token_ids, hidden)
        for index, layer in zip(self.rank.layers(num_layers), self.layers, strict=True):
            if tap is not None:
                tap.see(self.ops, index, hidden)
            wanted = rows if index == num_layers - 1 and not reads_all else None
            hidden = layer.forward(self.ops, attention, index, hidden, wanted)
            if self.layer_inputs is not None and own is not None and len(hidden) > 0:
                of_layer = own[index] if wanted is None else own[index].index_select(0, wanted)
                hidden = self.layer_inputs.gates[index].forward(self.ops, hidden, of_layer)
        if self.stages is not None and not self.rank.is_last:
            self.stages.send(hidden)
        if tap is None or not reads_all:
            return hidden
        tap.see(self.ops, num_layers, self.normed(hidden))
        return hidden if rows is None else hidden.index_select(0, rows)

    def _entering(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states before the first of this stage's layers."""
        if self.embedding is not None:
            return self.ops.embed(token_ids, self.embedding, self.embedding_scale)
        assert self.stages is not None, "an earlier stage has the embedding"
        return self.stages.receive(len(token_ids), self.config.hidden_size, self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None, "the last stage has it"
        return self.ops.logits(self.normed(hidden), self.lm_head, self.logit_scale, self.logit_cap)

    def normed(self, hidden: Tensor) -> Tensor:
        return self.ops.norm(hidden, self.final_norm)

    def matrices(self) -> Iterator[Held]:
        yield from filter(None, (self.embedding, self.lm_head))
        for layer in self.layers:
            yield from layer.matrices()
        if self.layer_inputs is not None:
            yield from self.layer_inputs.matrices()

    def expert_counts(self) -> list[Tensor]:
        found = (layer.mlp for layer in self.layers)
        mlps = [mlp.mixture if isinstance(mlp, LatentExperts | BesideExperts) else mlp for mlp in found]
        mixtures = (mlp.experts if isinstance(mlp, CompiledExperts) else mlp for mlp in mlps)
        return [each.counts for each in mixtures if isinstance(each, Experts | TiledExperts)]

    def activation_bytes(self) -> int:
        config = self.config
        copies = 3 if config.is_latent else 2  # of what all heads have: of latents, a product of each head is copied
        heads = max((copies * each.num_heads + 2 * each.num_kv_heads) * each.head_dim for each in config.kinds_of_heads)
        inner = 3 * max((mlp.inner_size for mlp in config.design.mlps), default=0)
        made = 4 * config.hidden_size * max((of.routing.num_chosen for of in config.design.mixtures), default=0)
        own = [each.token_values for each in config.design.recurrent if each is not None]
        states = max((values * self.dtype.itemsize + floats * 4 for values, floats in own), default=0)
        if config.design.layer_inputs is not None:
            made += token_bytes(config.design.layer_inputs, config.num_layers, self.dtype.itemsize)
        return (4 * config.hidden_size + heads + inner) * self.dtype.itemsize + made + states  # experts', in float32

    def bytes_read(self, num_rows: int) -> int:
        mixers = (layer.attention for layer in self.layers if layer.attention is not None)
        attentions = sum(weight_bytes(each) for mixer in mixers for each in mixer.matrices())
        mlps = sum(layer.mlp.bytes_read(num_rows) for layer in self.layers if layer.mlp is not None)
        embedded = 0 if self.embedding is None else weight_bytes(self.embedding) * num_rows // self.config.vocab_size
        embedded += 0 if self.layer_inputs is None else self.layer_inputs.bytes_read(num_rows)
        return embedded + attentions + mlps + (0 if self.lm_head is None else weight_bytes(self.lm_head))

    def through(self, calls: Calls) -> "Decoder":
        ops = CompiledOps(calls)
        stages = None if self.stages is None else self.stages.through(calls)
        return replace(
            self, ops=ops if self.ranks is None else RankedOps(ops, self.ranks.through(calls)), stages=stages
        )

    def among(self, ranks: Collective | Stages) -> "Decoder":
        """Return the same part of a model, which computes with the other ranks: adds to their sums, or follows them."""
        if isinstance(ranks, Stages):
            return replace(self, stages=ranks)
        return replace(self, ops=RankedOps(self.ops, ranks), ranks=ranks)

    @classmethod
    def build(cls, config: ModelConfig, tensors: TensorSource, ops: DeviceOps, rank: Rank = WHOLE) -> Self:
        """Put a rank's part of a model together."""
        of = config.design
        embedding, head = embedding_and_head(config, tensors, ops, rank)
        parts = Parts(config, tensors, ops, rank)
        layers = tuple(
            build_layer(of.layers[index], replace(parts, prefix=f"model.layers.{index}."))
            for index in rank.layers(len(of.layers))
        )
        return cls(
            config=config,
            rank=rank,
            ops=ops,
            embedding=embedding,
            embedding_scale=_embedding_scale(of.embedding, tensors.dtype),
            layers=layers,
            ropes=ropes_of(config, tensors.device),
            final_norm=parts.norm(of.head.norm_name, of.head.norm),
            lm_head=head,
            logit_scale=of.head.scale,
            logit_cap=of.head.soft_cap,
            layer_inputs=None if of.layer_inputs is None else LayerInputs.build(of.layer_inputs, parts),
        )


def embedding_and_head(
    config: ModelConfig, tensors: TensorSource, ops: DeviceOps, rank: Rank = WHOLE
) -> tuple[Linear | None, Linear | None]:
    """Return a rank's part of both; None: another stage has it."""
    sizes, rows = (config.vocab_size, config.hidden_size), rank.rows()
    embedding: Linear | None = None
    head: Linear | None = None
    is_tied = config.tie_word_embeddings and rank.is_last
    if rank.is_first or is_tied:
        embedding, head = ops.held_embedding(tensors.take_matrix(EMBEDDING, *sizes, shard=rows), tied=is_tied)
    if rank.is_last and head is None:
        head = ops.held(tensors.take_matrix(LM_HEAD, *sizes, bias=config.design.head.bias, shard=rows))
    of_stage = (embedding if rank.is_first else None, head)
    first, last = (None if each is None else vocab_parallel(each, rank, config.vocab_size) for each in of_stage)
    return first, last


def ignores(name: str, config: ModelConfig) -> bool:
    """Say whether checkpoints may hold a tensor of this name that the model does not read."""
    if name.endswith((ANGLES, *XIELU_CONSTANTS)):
        return True
    if config.design.guessing is not None and name.startswith(config.design.guessing):
        return True
    more = range(config.num_layers, config.num_layers + config.design.num_more_layers)
    if any(name.startswith(f"model.layers.{index}.") for index in more):
        return True
    if any(name.startswith(f"model.layers.{index}.self_attn.{kv}") for index in config.design.readers for kv in UNREAD):
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
    of = config.design
    kinds = [None if each is None else (each.rope, heads_of(of, [i])) for i, each in enumerate(of.attentions)]
    ropes = {
        kind: Rope(config.with_heads(kind[1]).rope_dim, kind[0], device)
        for kind in dict.fromkeys(kinds)
        if kind is not None
    }
    return tuple(next(iter(ropes.values())) if kind is None else ropes[kind] for kind in kinds)
