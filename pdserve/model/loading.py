"""Turn a checkpoint's tensors into a model: every tensor it needs, each once, in the right shape, and no others."""

from collections.abc import Callable, Iterable, Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.model.attention import QkNorm
from pdserve.model.config import ModelConfig
from pdserve.model.layer_choice import fused_mlp, linear, norm
from pdserve.model.layers import Linear, Mlp, Norm, SplitMlp, packs
from pdserve.model.llama import Layer, Model
from pdserve.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, Shape, hf_shapes, is_ignored, layer_prefix
from pdserve.model.rope import Rope

Weight = Tensor | npt.NDArray[np.generic]
Weights = Iterable[tuple[str, Weight]]
NAMED_AT_MOST = 3  # missing tensors an error names before it only counts


def load_model(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    progress: Callable[[float], None] | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """Build the model from Hugging Face-named tensors, in any order.

    `progress` is called with the share of elements read, up to 1.0. ConfigError names a tensor that is missing,
    unexpected, given twice or misshapen.
    """
    builder = _Builder(config, dtype, torch.device(device))
    shapes = hf_shapes(config)
    total = sum(prod(shape) for shape in shapes.values())
    for name, weight in weights:
        if is_ignored(name, config):
            continue
        builder.add(name, weight, shapes)
        if progress is not None:
            progress(builder.num_elements / total)
    return builder.model(shapes)


class _Builder:
    """Gathers tensors in the wanted dtype, then moves them into layers one by one, so that no two copies pile up."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_elements = 0
        self._config = config
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, weight: Weight, shapes: Mapping[str, Shape]) -> None:
        if name not in shapes:
            raise ConfigError(f"{name}: not a tensor of {self._config.architecture}")
        if name in self._tensors:
            raise ConfigError(f"{name}: given twice")
        if tuple(weight.shape) != shapes[name]:
            raise ConfigError(f"{name}: shape {tuple(weight.shape)}, the config asks for {shapes[name]}")
        tensor = weight if isinstance(weight, Tensor) else torch.tensor(weight)
        self._tensors[name] = tensor.to(device=self._device, dtype=self._dtype).contiguous()
        self.num_elements += tensor.numel()

    def model(self, shapes: Mapping[str, Shape]) -> Model:
        missing = [name for name in shapes if name not in self._tensors]
        if missing:
            more = f" and {len(missing) - NAMED_AT_MOST} more" if len(missing) > NAMED_AT_MOST else ""
            raise ConfigError(f"{', '.join(missing[:NAMED_AT_MOST])}{more}: missing from the weights")
        config = self._config
        embedding = self._take(EMBEDDING)
        layers = tuple(self._layer(layer_prefix(index)) for index in range(config.num_layers))
        return Model(
            config=config,
            embedding=embedding,
            layers=layers,
            final_norm=self._norm(FINAL_NORM),
            lm_head=linear(embedding if config.tie_word_embeddings else self._take(LM_HEAD)),
            rope=Rope(config, self._device),
        )

    def _layer(self, prefix: str) -> Layer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qk_norm = None
        if self._config.qk_norm:
            qk_norm = QkNorm(self._norm(f"{attention}q_norm.weight"), self._norm(f"{attention}k_norm.weight"))
        return Layer(
            input_norm=self._norm(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
            qk_norm=qk_norm,
            o=self._linear(f"{attention}o_proj"),
            post_attention_norm=self._norm(f"{prefix}post_attention_layernorm.weight"),
            mlp=self._mlp(mlp),
        )

    def _mlp(self, prefix: str) -> Mlp:
        gate, up, down = f"{prefix}gate_proj", f"{prefix}up_proj", f"{prefix}down_proj"
        if packs(self._dtype, self._device):
            return SplitMlp(self._linear(gate), self._linear(up), self._linear(down))
        return fused_mlp(self._linear(gate, up), self._linear(down), self._device)

    def _linear(self, *names: str) -> Linear:
        """Return one layer that computes the named ones side by side."""
        weight = torch.cat([self._take(f"{name}.weight") for name in names])
        has_bias = f"{names[0]}.bias" in self._tensors
        bias = torch.cat([self._take(f"{name}.bias") for name in names]) if has_bias else None
        return linear(weight, bias)

    def _norm(self, name: str) -> Norm:
        return norm(self._take(name), self._config.rms_norm_eps)

    def _take(self, name: str) -> Tensor:
        return self._tensors.pop(name)
