"""Which form a model's matrices are kept in: as floats, as a GGUF file codes them, or rounded while they are read."""

from typing import Literal

from pdserve.checkpoint.checkpoint import Checkpoint, Weights
from pdserve.config import Device, Quantization
from pdserve.errors import ConfigError

ChosenQuantization = Literal["none", "int8", "int4", "gguf"]

QUANTIZED_DTYPES = ("bfloat16", "float32")  # of the inputs of quantized products
BITS = {"int8": 8, "int4": 4}
VOCABULARY_BITS = 8  # of embedding and head, at least: rounding them to 4 bits costs the most and gains the least
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def choose_quantization(asked: Quantization, checkpoint: Checkpoint, dtype: str, device: Device) -> ChosenQuantization:
    """Return the form of a model's matrices; ConfigError if it is asked for and not possible.

    auto keeps what a GGUF file has, where inputs are bfloat16: float32 is asked for by those who want exact products.
    """
    on_gpu = device in ("cuda", "interpreter")
    if asked == "auto":
        keeps = checkpoint.coded_weights is not None and dtype == "bfloat16" and not on_gpu
        return "gguf" if keeps else "none"
    if asked == "none":
        return "none"
    if on_gpu:
        raise ConfigError(f"quantization: {asked} is for CPUs, device is {device}")
    if dtype not in QUANTIZED_DTYPES:
        raise ConfigError(f"quantization: {asked} goes with dtype {' or '.join(QUANTIZED_DTYPES)}, not {dtype}")
    if asked == "gguf" and checkpoint.coded_weights is None:
        raise ConfigError(f"quantization: gguf: {checkpoint.path} is no GGUF file with quantized tensors")
    return asked


def weights_in_form(checkpoint: Checkpoint, quantization: ChosenQuantization) -> Weights:
    if quantization == "gguf" and checkpoint.coded_weights is not None:
        return checkpoint.coded_weights()
    return in_form(checkpoint.weights(), quantization)


def in_form(weights: Weights, quantization: ChosenQuantization) -> Weights:
    """Round matrices of floats, where it is asked for; those whose inputs make no whole groups stay as they are."""
    return _rounded(weights, BITS[quantization]) if quantization in BITS else weights


def _rounded(weights: Weights, bits: int) -> Weights:
    import numpy as np  # noqa: PLC0415 - routers open checkpoints without it

    from pdserve.model.groups import GROUP, Groups, quantized  # noqa: PLC0415 - routers know the names without numpy

    for name, weight in weights:
        if isinstance(weight, Groups) or weight.ndim != 2 or weight.shape[1] % GROUP:
            yield name, weight
        else:
            values = weight if isinstance(weight, np.ndarray) else weight.float().numpy()
            yield name, quantized(values, max(bits, VOCABULARY_BITS) if name in VOCABULARY else bits)
