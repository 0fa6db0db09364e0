"""Heads of random weights beside models, without files."""

from dataclasses import replace

import torch
from held_weights import held
from torch import Tensor

from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.eagle3 import Eagle3Head
from pdserve.model.eagle3_config import HeadConfig
from pdserve.model.family import Model, Tensors, Wanted
from pdserve.model.mtp import MtpHead
from pdserve.model.ops import Dense, DeviceOps, TorchOps


def with_room(model: Model) -> Model:
    """Return a model whose pages have room for KV of a head."""
    assert isinstance(model, Decoder)
    return replace(model, config=replace(model.config, num_head_layers=1))


def made_head(model: Model, ops: DeviceOps) -> Eagle3Head:
    """Return a head that reads all layers of a model; it has every other token, and is nearly always wrong."""
    of = model.config
    shape = {"hidden_size": of.hidden_size, "intermediate_size": 2 * of.hidden_size, "vocab_size": of.vocab_size}
    heads = {"num_attention_heads": of.num_heads, "num_key_value_heads": of.num_kv_heads, "head_dim": of.head_dim}
    own = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "rms_norm_eps": 1e-5, **shape, **heads}
    token_ids = torch.arange(0, of.vocab_size, 2)
    config = HeadConfig(ModelConfig.from_hf(own), len(token_ids), tuple(range(of.num_layers)), norms_residual=False)
    wanted = Wanted()
    Eagle3Head.build(config, wanted, TorchOps(), token_ids, None)
    return Eagle3Head.build(config, _random(wanted, model), ops, token_ids.to(model.device), None)


def made_module(model: Model, ops: DeviceOps) -> MtpHead:
    """Return a module of random weights for a model of a family that has such modules."""
    wanted, unused = Wanted(), Dense(torch.empty(0))
    MtpHead.build(model.config, wanted, TorchOps(), (unused, unused))
    assert model.embedding is not None
    assert model.lm_head is not None
    return MtpHead.build(model.config, _random(wanted, model), ops, (model.embedding, model.lm_head))


def _random(wanted: Wanted, model: Model) -> Tensors:
    drawn = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=drawn)
        return 1 + 0.2 * noise if len(shape) == 1 else 2 * noise * shape[1] ** -0.5

    weights = held({name: random(shape) for name, shape in wanted.shapes.items()})
    return Tensors(weights, model.dtype, model.device)
