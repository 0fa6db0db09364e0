"""Which models the kernels of GPUs serve, by their configs: workers ask it, and `models check`, which needs no GPU."""

import os
from typing import TYPE_CHECKING

import torch

from pdserve.base.errors import ConfigError
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.config import ModelConfig
from pdserve.model.layer_groups import layer_groups
from pdserve.protocol.kvlayout import KvCode
from pdserve.settings.config import Device, WorkerConfig

if TYPE_CHECKING:
    from pdserve.kernels.attention import AttentionSpec


def choose_interpreter(device: Device) -> None:
    """Let Triton interpret its kernels where a device is none, before they are imported."""
    if device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"


def check_kernels(
    device: Device, model: ModelConfig, page_size: int, dtype: torch.dtype, code: KvCode | None = None
) -> "list[AttentionSpec]":
    """Return what attention is asked to do; ConfigError if the kernels do not serve a model, or pages of this size."""
    choose_interpreter(device)
    # A CPU worker has no need of Triton.
    from pdserve.engine.attention_triton import attention_spec  # noqa: PLC0415
    from pdserve.engine.states_triton import states_spec  # noqa: PLC0415
    from pdserve.kernels.attention import PagedAttention  # noqa: PLC0415
    from pdserve.kernels.states import DTYPES  # noqa: PLC0415
    from pdserve.kernels.tuning import INTERPRETER  # noqa: PLC0415

    if lacking := _lacking(model):
        raise ConfigError(f"device: {device} does not serve this model: its kernels have no {lacking} yet")
    try:
        if model.has_states:
            states_spec(model, page_size, (1, 1))
            if dtype not in DTYPES:
                raise ValueError(f"dtype must be one of {DTYPES} beside states, got {dtype}")
        specs = [
            attention_spec(own, scores, group.page_size, 1, KvRows(own.head_dim, dtype, code))
            for group in layer_groups(model, page_size, powers_of_two=True)
            for own in [model.with_heads(group.heads)]
            for scores in dict.fromkeys(model.design.scores_of(group.layers))
        ]
        for spec in specs:
            PagedAttention(spec, "meta", chip=INTERPRETER)  # on any chip it refuses the same
    except ValueError as error:
        raise ConfigError(f"device: {device} does not serve this model: {error}") from error
    return specs


def _lacking(model: ModelConfig) -> str:
    """Return what a model needs that no kernel computes; empty: nothing."""
    if model.attends_in_torch:
        return "windows that begin at multiples of their length"
    weighs = any(each.weighs_inputs for each in model.design.mixtures)
    return "experts whose inputs are weighed" if weighs else ""


def check_use(config: WorkerConfig, model: ModelConfig, specs: "list[AttentionSpec]", device: torch.device) -> None:
    """Raise ConfigError where kernels would meet too long sequences, or FlashInfer serves no such attention."""
    from pdserve.engine.attention_flashinfer import why_not  # noqa: PLC0415 - a CPU worker has no need of Triton

    longest = model.longest_without_growth
    asked = config.max_model_len or model.max_position_embeddings
    if longest is not None and asked > longest:
        raise ConfigError(f"max_model_len: {asked}; device {config.device} serves this model up to {longest} tokens")
    unlike = "its layers keep a state" if model.has_states else ""
    if config.attention_backend == "flashinfer" and (reason := unlike or why_not(specs, device)):
        raise ConfigError(f"attention_backend: flashinfer is not used: {reason}")
