"""Builds a model from tensors: each that it needs, once, in the right shape, and no others."""

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.layers import INPUT_BITS
from pdserve.kernels.cpu.library import library
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder, check_constants, ignores
from pdserve.model.family import Model, Progress, Shapes, Tensors, Wanted
from pdserve.model.ops import DeviceOps, TorchOps
from pdserve.model.ops_cpu import CpuOps
from pdserve.model.parallel import Collective
from pdserve.model.sharding import check_divides
from pdserve.model.stages import Stages
from pdserve.model.weights import WHOLE, Part, Rank, Stored, Weights
from pdserve.settings.degrees import Degrees

DUMMY_STD = 0.02
NAMED_AT_MOST = 3  # missing tensors that an error names; it counts the others


def load_model(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    input_bits: int = INPUT_BITS,
) -> Model:
    """Build the model from Hugging Face-named tensors.

    `progress` is called with the share of elements read, up to 1.0. input_bits: of the inputs of quantized products, 8
    or 16. ConfigError names a tensor that is missing, unexpected or misshapen, before any is read.
    """
    device = torch.device(device)
    tensors = Tensors(needed_weights(config, weights), dtype, device, progress)
    return Decoder.build(config, tensors, ops_for(device, input_bits))


def load_rank(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    ranks: Collective | Stages,
    progress: Progress | None = None,
    input_bits: int = INPUT_BITS,
) -> Model:
    """Build one rank's part of a model; do as `load_model` otherwise. All ranks load at the same time."""
    rank, device = ranks.rank, ranks.device
    check_divides(config, rank.degrees)
    needed = needed_weights(config, weights)
    tensors = Tensors({name: needed[name] for name in shapes_of(config, rank)}, dtype, device, progress)
    return Decoder.build(config, tensors, ops_for(device, input_bits), rank).among(ranks)


def shapes_of(config: ModelConfig, rank: Rank = WHOLE) -> Shapes:
    """Return the shape of every tensor that a rank's part of a model needs."""
    return _wanted(config, rank).shapes


def shares(config: ModelConfig, degrees: Degrees) -> list[float]:
    """Return which share of a model's elements each rank has; ConfigError if it is not divided. Some are on several."""
    check_divides(config, degrees)
    ranks = [Rank.at(index, degrees) for index in range(degrees.num_ranks)]
    whole = _wanted(config, WHOLE).num_elements
    return [_wanted(config, rank).num_elements / whole for rank in ranks]


def _wanted(config: ModelConfig, rank: Rank) -> Wanted:
    wanted = Wanted()
    Decoder.build(config, wanted, TorchOps(), rank)
    return wanted


def needed_weights(config: ModelConfig, weights: Weights) -> Weights:
    """Return the tensors that the model needs; ConfigError if they are not there, or others are."""
    needed = checked(weights, shapes_of(config), config.architecture, partial(ignores, config=config))
    check_constants(weights)
    return needed


def checked(weights: Weights, shapes: Shapes, owner: str, ignored: Callable[[str], bool]) -> Weights:
    """Return the tensors of these shapes; ConfigError if one is missing, or there is another that is not ignored."""
    for name, stored in weights.items():
        if name not in shapes and not ignored(name) and not _adds_nothing(name, stored):
            raise ConfigError(f"{name}: not a tensor of {owner}")
        if name in shapes and stored.shape != shapes[name]:
            raise ConfigError(f"{name}: shape {stored.shape}, the config asks for {shapes[name]}")
    if missing := [name for name in shapes if name not in weights]:
        more = f" and {len(missing) - NAMED_AT_MOST} more" if len(missing) > NAMED_AT_MOST else ""
        raise ConfigError(f"{', '.join(missing[:NAMED_AT_MOST])}{more}: missing from the weights")
    return {name: weights[name] for name in shapes}


def _adds_nothing(name: str, stored: Stored) -> bool:
    """Say whether a tensor is a bias of zeros: some who quantize give one to every matrix."""
    return name.endswith(".bias") and len(stored.shape) == 1 and not torch.as_tensor(stored.read(())).any()


def ops_for(device: torch.device, input_bits: int) -> DeviceOps:
    """Return the operations of a device for one model. input_bits: of the inputs of quantized products."""
    if device.type == "cuda":
        from pdserve.model.ops_cuda import CudaOps  # noqa: PLC0415 - a worker on a CPU starts without Triton

        return CudaOps(input_bits)
    loaded = library()
    return TorchOps() if isinstance(loaded, Missing) else CpuOps(loaded, input_bits)


def dummy_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Return random tensors in place of a checkpoint's, float32: norms near one, the rest small and normal."""
    return {name: Stored(shape, partial(_noise, name, shape, seed)) for name, shape in shapes_of(config).items()}


def _noise(name: str, shape: tuple[int, ...], seed: int, part: Part) -> Tensor:
    """Return what depends on the seed and the name alone, not on what else is read."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    noise = torch.randn(shape, generator=generator) * DUMMY_STD
    return (noise + 1.0 if name.endswith("norm.weight") else noise)[part]
