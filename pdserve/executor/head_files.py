"""Opens a head: of EAGLE-3, a directory with a config.json and safetensors, and no tokenizer; or a model's own."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import (
    BITS,
    Checkpoint,
    ChosenQuantization,
    file_digest,
    in_form,
    naming,
    weights_in_form,
)
from pdserve.checkpoint.checkpoint import EMBEDDING as TARGET_EMBEDDING
from pdserve.checkpoint.hf_directory import read_json, read_weights, weight_files
from pdserve.kernels.cpu.layers import INPUT_BITS
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import ANGLES, SHARED_MATRICES, embedding_and_head
from pdserve.model.eagle3 import EMBEDDING, LAYER, LM_HEAD, Eagle3Head, feature_part
from pdserve.model.eagle3_config import HeadConfig, read_head
from pdserve.model.family import Model, Shapes, Tensors, Wanted
from pdserve.model.loading import checked, ops_for
from pdserve.model.mtp import TARGETS, MtpHead, prefix_of
from pdserve.model.ops import Dense, TorchOps
from pdserve.model.parallel import Collective
from pdserve.model.weights import WHOLE, Part, Stored, Weights
from pdserve.protocol.drafts import DraftSource

_FC, _TO_TARGET, _IN_TARGET = "fc.weight", "d2t", "t2d"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head, not loaded yet."""

    path: Path
    config: HeadConfig
    weights: Weights  # those that the head reads, by the names of `model.eagle3`
    token_ids: torch.Tensor  # int64 [draft_vocab_size]: the model's tokens
    fingerprint: str  # of config and weights
    source: DraftSource = DraftSource.EAGLE3

    def with_matrices_of(self, target: Checkpoint) -> "HeadFiles":
        """Return the head with the model's whole embedding, unless it has one: for a rank that holds a part of it."""
        return replace(self, weights={f"{EMBEDDING}.weight": target.weights()[TARGET_EMBEDDING], **self.weights})

    def held(self, quantization: ChosenQuantization) -> Weights:
        """Return the weights as they are loaded: in 8 bits where the model's file has codes."""
        return in_form(self.weights, quantization if quantization in ("none", *BITS) else "int8")

    def load(
        self,
        model: Model,
        quantization: ChosenQuantization = "none",
        input_bits: int = INPUT_BITS,
        ranks: Collective | None = None,
    ) -> Eagle3Head:
        """Load the head in a model's dtype. quantization: the model's. ranks: of which each loads a part."""
        tensors = Tensors(self.held(quantization), model.dtype, model.device)
        rank = WHOLE if ranks is None else ranks.rank
        token_ids, embedding = self.token_ids.to(model.device), model.embedding
        embedding = None if f"{EMBEDDING}.weight" in self.weights else embedding
        ops = ops_for(model.device, input_bits)
        head = Eagle3Head.build(self.config, tensors, ops, token_ids, embedding, rank)
        return head if ranks is None else head.among(ranks)


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """A model's own module, not loaded yet."""

    checkpoint: Checkpoint
    weights: Weights  # those that the module reads
    fingerprint: str = "mtp"  # beside that of the model
    source: DraftSource = DraftSource.MTP

    def with_matrices_of(self, target: Checkpoint) -> "MtpFiles":
        """Return the module with the model's whole embedding and head: for a rank that holds a part of them."""
        names = (f"{name}.weight" for name in SHARED_MATRICES)
        stored = target.weights()
        return replace(self, weights={**self.weights, **{name: stored[name] for name in names if name in stored}})

    def held(self, quantization: ChosenQuantization) -> Weights:
        """Return the weights as they are loaded, which is as the model is."""
        weights = weights_in_form(self.checkpoint, quantization)
        return {name: weights[name] for name in self.weights}

    def load(
        self,
        model: Model,
        quantization: ChosenQuantization = "none",
        input_bits: int = INPUT_BITS,
        ranks: Collective | None = None,
    ) -> MtpHead:
        """Load the module as its model was loaded. ranks: of which each loads a part."""
        tensors = Tensors(self.held(quantization), model.dtype, model.device)
        rank = WHOLE if ranks is None else ranks.rank
        ops = ops_for(model.device, input_bits)
        embedding, lm_head = model.embedding, model.lm_head
        if TARGET_EMBEDDING in self.weights:
            embedding, lm_head = embedding_and_head(model.config, tensors, ops)
        assert embedding is not None, "pipeline stages guess nothing"
        assert lm_head is not None, "as well"
        module = MtpHead.build(model.config, tensors, ops, (embedding, lm_head), rank)
        return module if ranks is None else module.among(ranks)


def open_mtp(checkpoint: Checkpoint) -> MtpFiles:
    """Open a model's module; ConfigError if it has none, or is of a family whose modules were not tested."""
    config, wanted = checkpoint.config, Wanted()
    if config.architecture not in TARGETS:
        raise ConfigError(f"modules were tested of {', '.join(TARGETS)}, and not of {config.architecture}")
    unused = Dense(torch.empty(0))
    MtpHead.build(config, wanted, TorchOps(), (unused, unused))
    prefix = prefix_of(config)
    own = {name: stored for name, stored in checkpoint.weights().items() if name.startswith(prefix)}
    copies = [prefix + name for name in TARGETS[config.architecture].copies]
    return MtpFiles(checkpoint, checked(own, wanted.shapes, "a module that guesses", copies.__contains__))


def open_head(path: Path, target: ModelConfig) -> HeadFiles:
    """Open a head for a model; ConfigError names the path, and the key or tensor that does not fit the model."""
    with naming(path):
        raw, files = read_json(path / "config.json"), weight_files(path)
        with naming("config.json"):
            config = read_head(raw, target)
        weights = {_own_name(name): stored for name, stored in read_weights(path).items() if not name.endswith(ANGLES)}
        token_ids = _token_ids(weights, config)
        digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
        for file in files:
            digest.update(f"\n{file_digest(file)}".encode())
        found = {**weights, **_feature_parts(weights, config)}
        shapes = _shapes(config, has_embedding=f"{EMBEDDING}.weight" in weights)
        needed = checked(found, shapes, "an EAGLE-3 head", (_FC, _TO_TARGET, _IN_TARGET).__contains__)
        return HeadFiles(path, config, needed, token_ids, digest.hexdigest())


def _shapes(config: HeadConfig, *, has_embedding: bool) -> Shapes:
    wanted = Wanted()
    other = None if has_embedding else Dense(torch.empty(0))
    Eagle3Head.build(config, wanted, TorchOps(), torch.empty(0), other)
    return wanted.shapes


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", LAYER, 1)


def _feature_parts(weights: Weights, config: HeadConfig) -> Weights:
    """Return the parts of `fc` that multiply the states of one layer each."""
    size, count = config.model.hidden_size, len(config.layers)
    fc = _needed(weights, _FC, (size, count * size))

    def read(start: int, part: Part) -> torch.Tensor:
        assert part == (), "no rank reads a part"
        return torch.as_tensor(fc.read((slice(None), slice(start, start + size))))

    return {f"{feature_part(n)}.weight": Stored((size, size), partial(read, n * size)) for n in range(count)}


def _token_ids(weights: Mapping[str, Stored], config: HeadConfig) -> torch.Tensor:
    """Return which of the model's tokens each of the head's is. `d2t` has the differences; `t2d` marks them."""
    count, vocab_size = config.draft_vocab_size, config.model.vocab_size
    _needed(weights, f"{LM_HEAD}.weight", (count, config.model.hidden_size))
    token_ids = torch.arange(count)
    if _TO_TARGET not in weights and count == vocab_size:
        return token_ids
    token_ids += torch.as_tensor(_needed(weights, _TO_TARGET, (count,)).read(())).long()
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) < count:
        raise ConfigError(f"{_TO_TARGET}: does not name {count} of the model's {vocab_size} tokens")
    if _IN_TARGET in weights:
        marked = torch.as_tensor(_needed(weights, _IN_TARGET, (vocab_size,)).read(())).bool()
        if not torch.equal(marked.nonzero()[:, 0], token_ids.sort().values):
            raise ConfigError(f"{_IN_TARGET}: marks other tokens than {_TO_TARGET} names")
    return token_ids


def _needed(weights: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> Stored:
    if name not in weights:
        raise ConfigError(f"{name}: missing from the weights")
    if weights[name].shape != shape:
        raise ConfigError(f"{name}: shape {weights[name].shape}, and {shape} is asked for")
    return weights[name]
