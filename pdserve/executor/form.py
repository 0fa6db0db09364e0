"""The form in which a worker holds a model. Each of its ranks chooses for itself, and alike."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import (
    TABLES,
    UNROUNDED,
    Checkpoint,
    ChosenQuantization,
    choose_quantization,
    weights_in_form,
)
from pdserve.executor.memory import share_weights
from pdserve.executor.threads import rank_threads
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kernels.tuning import device_of
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model, load_rank
from pdserve.model.ops import rounds_inputs
from pdserve.model.parallel import Collective
from pdserve.model.sharding import check_state_parts
from pdserve.model.stages import Stages
from pdserve.model.weights import GROUP, SEGMENT, Stored, Weights
from pdserve.protocol.kvlayout import KvCode
from pdserve.settings.config import Device, KvCacheDtype, WorkerConfig
from pdserve.settings.processor import choose_dtype, read_cpu_info

logger = logging.getLogger(__name__)

KERNEL_DEVICES = ("cuda", "interpreter")  # on which an engine runs Triton's kernels
DUMMY = "dummy 2"  # in the weights' hash: the number goes up when these weights change
LATENT_ROWS = ", latents first"  # as well: workers whose rows begin with other features are not paired
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCALE_RUNS = (SEGMENT, 64, GROUP)  # inputs that share a scale on a GPU, where they are not all

Progress = Callable[[float], None]  # takes the share of the model that is loaded


@dataclass(frozen=True, slots=True)
class Form:
    """A checkpoint, and what its weights become."""

    checkpoint: Checkpoint
    dtype: str
    quantization: ChosenQuantization
    weights_hash: str


def choose_form(config: WorkerConfig, checkpoint: Checkpoint, weights_hash: str = "") -> Form:
    """Return the form that a worker's settings and this machine ask for; ConfigError if there is none.

    weights_hash: as another rank has taken it; else the files are read for it.
    """
    if config.num_threads is not None:
        torch.set_num_threads(rank_threads(config.num_threads, config.degrees.ranks_per_node) or 1)
    compiled = config.device not in KERNEL_DEVICES and not isinstance(library(), Missing)
    dtype, because = choose_dtype(config.dtype, config.device, read_cpu_info(), compiled=compiled)
    if config.load_format == "dummy":
        weights = partial(dummy_weights, checkpoint.config, config.seed)
        checkpoint = replace(checkpoint, weights=weights, coded_weights=None)
    checkpoint = in_parts(checkpoint, config)
    quantization = choose_quantization(config.quantization, checkpoint, dtype, config.device)
    products = _products(config, quantization)
    logger.info("dtype %s: %s; quantization %s", dtype, because, products)
    source = DUMMY if config.load_format == "dummy" else config.load_format
    rows = LATENT_ROWS if checkpoint.config.is_latent else ""
    weights_hash = weights_hash or f"{checkpoint.fingerprint} {source} {config.seed} {products}{rows}"
    return Form(checkpoint, dtype, quantization, weights_hash)


def in_parts(checkpoint: Checkpoint, config: WorkerConfig) -> Checkpoint:
    """Return a model whose states are divided as pages are where ranks have memory of their own.

    ConfigError where they cannot be.
    """
    model = checkpoint.config
    if config.rank_memory != "own" or not model.has_states:
        return checkpoint
    check_state_parts(model, config.degrees.tensor)
    return replace(checkpoint, config=replace(model, num_state_parts=model.num_kv_heads))


def _products(config: WorkerConfig, quantization: ChosenQuantization) -> str:
    """Name what is multiplied."""
    if quantization == "none":
        return quantization
    named = f"{quantization} x {config.quantized_inputs} bits"
    if config.device != "cuda" or config.quantized_inputs != 8 or device_of("cuda").multiplies_e4m3:
        return named
    return f"{named}, floats of 8 bits x 16 bits"


def check_inputs(config: WorkerConfig, model: Model) -> None:
    """Log how many matrices of layers take inputs of 8 bits where these are asked for; ConfigError if none does."""
    if config.quantized_inputs != 8:
        return
    matrices = {id(each): each for each in model.matrices()}
    for each in (model.embedding, model.lm_head):  # the head may be the one that is rounded
        matrices.pop(id(each), None)
    count = sum(map(rounds_inputs, matrices.values()))
    if count == 0:
        why = f" ({missing})" if config.device in ("auto", "cpu") and isinstance(missing := library(), Missing) else ""
        raise ConfigError(
            f"quantized_inputs: 8: no product of these weights rounds its inputs on this device{why}; 16 is served"
        )
    logger.info("inputs of %d of %d matrices of layers are rounded to 8 bits", count, len(matrices))


def choose_kv_code(asked: KvCacheDtype, model: ModelConfig) -> KvCode | None:
    """Return the form of K and V in pages, or None: the model's type. ConfigError where the model is not served so."""
    if asked == "auto":
        return None
    if kind := untried_kind(model):
        raise ConfigError(f"kv_cache_dtype: {asked} is not served for a model with {kind}; auto is")
    return asked


def untried_kind(model: ModelConfig, **others: bool) -> str | None:
    """Return what a model has that was tried in plain settings only. others: what else was not, or was, by name."""
    kinds = {
        "states": model.has_states,
        "latent rows": model.is_latent,
        "heads of two sizes": model.has_unlike_heads,
        model.shared_between_layers or "": model.shared_between_layers is not None,
        "attention that torch computes": model.attends_in_torch,
        "queries that grow with their position": model.longest_without_growth is not None,
        **others,
    }
    return next((kind for kind, has in kinds.items() if has), None)


def weight_bytes(weights: Weights, dtype: str, device: Device) -> int:
    """Return the bytes that weights take in a device's memory, nearly. weights: in the form in which they are held."""
    return sum([_bytes_of(name, stored, dtype, device) for name, stored in weights.items()])


def _bytes_of(name: str, stored: Stored, dtype: str, device: Device) -> int:
    count, codes, on_gpu = prod(stored.shape), stored.codes, device == "cuda"
    is_table = name in TABLES
    takes_fp8 = on_gpu or (dtype == "bfloat16" and not is_table)
    if codes is None or name.endswith(UNROUNDED) or (codes.is_fp8 and not takes_fp8) or (on_gpu and is_table):
        return count * DTYPES[dtype].itemsize
    outputs, inputs = stored.shape
    group, scale_bytes = SEGMENT if codes.is_fp8 else GROUP, 4  # of an integer's group a scale and a minimum
    if on_gpu:
        group = next((run for run in SCALE_RUNS if codes.group < inputs and codes.group % run == 0), inputs)
        scale_bytes = 4 if codes.is_fp8 or codes.has_zeros else 2
    return count * codes.bits // 8 + outputs * -(-inputs // group) * scale_bytes


def load_form(
    config: WorkerConfig,
    form: Form,
    device: torch.device,
    ranks: Collective | Stages | None,
    progress: Progress | None = None,
) -> Model:
    """Load a model, or with others a rank's part of it."""
    weights, dtype = weights_in_form(form.checkpoint, form.quantization, config.device), DTYPES[form.dtype]
    model_config, input_bits, name = form.checkpoint.config, config.quantized_inputs, form.weights_hash
    if ranks is None:
        model = load_model(model_config, weights, dtype, progress, device, input_bits)
    else:
        model = load_rank(model_config, weights, dtype, ranks, progress, input_bits)
        name = f"{name}, {ranks.rank}"
    if config.shared_weights_dir is not None and device.type == "cpu":
        share_weights(model, config.shared_weights_dir, name)
    return model
