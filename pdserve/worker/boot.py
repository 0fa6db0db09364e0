"""Turns a worker's configuration into an engine and a mover.

Opens the checkpoint, loads the model, lays out the pages, and starts the library that moves them.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from pdserve.checkpoint.checkpoint import Checkpoint, choose_quantization, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.config import Device, WorkerConfig
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import EngineRunner, Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.errors import ConfigError, not_installed
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kvlayout import KvLayout, PageDigest
from pdserve.kvtransfer.backends.backend import Backend
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.copies import OnStopped
from pdserve.kvtransfer.device_region import device_region
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.session import Peer
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model
from pdserve.prefix_hash import PrefixHasher
from pdserve.processor import allocator_problem, choose_dtype, cpu_name, read_cpu_info
from pdserve.roles import lacks_pages
from pdserve.rpc import split_address
from pdserve.worker.memory import available_bytes, share_weights
from pdserve.worker.no_gpu import driver_version, why_no_gpu

logger = logging.getLogger(__name__)

KERNEL_DEVICES = ("cuda", "interpreter")  # on which an engine runs Triton's kernels
MAX_CHARACTERS = 100
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Engine:
    runner: EngineRunner
    scheduler: Scheduler
    layout: KvLayout
    vocab_size: int
    model_name: str


def open_model(config: WorkerConfig) -> Checkpoint:
    """Open the configured checkpoint; ConfigError names what is wrong with it."""
    return open_checkpoint(resolve_model(config.model))


def build_engine(
    config: WorkerConfig, checkpoint: Checkpoint, secret: bytes, progress: Callable[[float], None]
) -> Engine:
    """Load weights and set up pages and scheduler. Takes seconds to minutes: not for an event loop."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if config.max_num_seqs > max(config.step_tokens.values()):
        raise ConfigError(
            f"max_num_seqs: {config.max_num_seqs} is over max_num_batched_tokens {config.max_num_batched_tokens}"
        )
    model_config = checkpoint.config
    compiled = config.device not in KERNEL_DEVICES and not isinstance(library(), Missing)
    dtype, because = choose_dtype(config.dtype, config.device, read_cpu_info(), compiled=compiled)
    if config.load_format == "dummy":
        checkpoint = replace(checkpoint, weights=partial(dummy_weights, model_config, config.seed), coded_weights=None)
    quantization = choose_quantization(config.quantization, checkpoint, dtype, config.device)
    products = quantization if quantization == "none" else f"{quantization} x {config.quantized_inputs} bits"
    logger.info("dtype %s: %s; quantization %s", dtype, because, products)
    layout = KvLayout(
        weights_hash=f"{checkpoint.fingerprint} {config.load_format} {config.seed} {products}",
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        dtype=dtype,
        page_digest=page_digest(config.device),
    )
    device = engine_device(config)
    if config.device in KERNEL_DEVICES:
        _check_kernels(config, model_config, DTYPES[dtype], device)
    num_pages = pages_asked_for(config, layout, device)
    if num_pages is not None:
        _limits(config, checkpoint, num_pages)  # refuses what does not fit before the weights are read
    weights = weights_in_form(checkpoint, quantization)
    model = load_model(model_config, weights, DTYPES[dtype], progress, device, config.quantized_inputs)
    if config.shared_weights_dir is not None and device.type == "cpu":
        share_weights(model, config.shared_weights_dir, layout.weights_hash)
    if num_pages is None:
        num_pages = _pages_beside(model, config, layout)
    limits = _limits(config, checkpoint, num_pages)
    if device.type == "cpu":
        _check_memory(config, num_pages * layout.page_bytes)
    model_name = config.served_model_name or checkpoint.name
    hasher = PrefixHasher(secret, model_name)
    return Engine(
        runner=_runner(model, num_pages, config, limits),
        scheduler=Scheduler(KvCache(num_pages, config.page_size, hasher), limits),
        layout=layout,
        vocab_size=model_config.vocab_size,
        model_name=model_name,
    )


def page_digest(device: Device) -> PageDigest:
    """Return what digests of pages are taken with: what is quick where the pages are."""
    return "splitmix64" if device == "cuda" else "xxh3"


def engine_device(config: WorkerConfig) -> torch.device:
    """Return where the engine runs; ConfigError if it is not there, or its memory could not be shared."""
    if config.device != "cuda":
        return torch.device("cpu")
    if problem := allocator_problem():
        raise ConfigError(problem)
    if not torch.cuda.is_available():
        reason = why_no_gpu(torch.version.cuda, driver_version(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        raise ConfigError(f"device: cuda is asked for, and torch sees no CUDA device: {reason}")
    return torch.device("cuda", torch.cuda.current_device())


def _limits(config: WorkerConfig, checkpoint: Checkpoint, num_pages: int) -> Limits:
    model_limit, page_size = checkpoint.config.max_position_embeddings, config.page_size
    max_model_len = _max_model_len(config, model_limit, num_pages * page_size)
    if lacks := lacks_pages(config.role, num_pages, -(-max_model_len // page_size)):
        raise ConfigError(f"role: {lacks}: lower max_model_len, or raise num_pages")
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.step_tokens.values()),
        max_model_len=max_model_len,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
    )


def pages_asked_for(config: WorkerConfig, layout: KvLayout, device: torch.device) -> int | None:
    """Return how many pages the configuration asks for; None: as many as a GPU has room for. ConfigError if it is 0."""
    if config.num_pages is not None:
        return config.num_pages
    if device.type == "cuda" and "kv_cache_memory_bytes" not in config.model_fields_set:
        return None
    num_pages = config.kv_cache_memory_bytes // layout.page_bytes
    if num_pages == 0:
        given = config.kv_cache_memory_bytes
        raise ConfigError(f"kv_cache_memory_bytes: {given} have no room for a page of {layout.page_bytes} bytes")
    return num_pages


def _check_memory(config: WorkerConfig, num_bytes: int) -> None:
    """Raise ConfigError where pages take more memory than there is: the kernel would end a worker that serves."""
    available = available_bytes()
    if num_bytes > available:
        field = "kv_cache_memory_bytes" if config.num_pages is None else "num_pages"
        raise ConfigError(f"{field}: KV pages take {num_bytes} bytes, and {available} are left beside the model")


def _pages_beside(model: Model, config: WorkerConfig, layout: KvLayout) -> int:
    """Return how many pages fit on the model's GPU beside it and a step."""
    # A CPU worker has no need of Triton.
    from pdserve.engine.attention_flashinfer import WORKSPACE_BYTES  # noqa: PLC0415
    from pdserve.engine.runner_cuda import GpuMemory, step_bytes  # noqa: PLC0415

    memory = GpuMemory.of(model.device)
    max_model_len = config.max_model_len or model.config.max_position_embeddings
    sizes = (max(config.step_tokens.values()), config.max_num_seqs, max_model_len)
    needed = step_bytes(model.config, *sizes, model.dtype.itemsize)
    needed += WORKSPACE_BYTES if config.attention_backend == "flashinfer" else 0
    num_pages = memory.pages_that_fit(config.gpu_memory_utilization, needed, layout.page_bytes)
    if num_pages == 0:
        share = f"{config.gpu_memory_utilization} of {memory.total} bytes, {memory.free} of them free"
        page = f"a page of {layout.page_bytes} bytes beside {memory.own + needed}"
        raise ConfigError(f"gpu_memory_utilization: {share}, leaves no room for {page}")
    return num_pages


def _check_kernels(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the kernels do not serve a model, or pages of the configured size."""
    if config.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
    # A CPU worker has no need of Triton.
    from pdserve.engine.attention_flashinfer import why_not  # noqa: PLC0415
    from pdserve.engine.attention_triton import attention_spec  # noqa: PLC0415
    from pdserve.kernels.attention import PagedAttention  # noqa: PLC0415
    from pdserve.kernels.tuning import device_of  # noqa: PLC0415

    try:
        spec = attention_spec(model, config.page_size, 1, dtype)
        PagedAttention(spec, "meta", chip=device_of(str(device)))
    except ValueError as error:
        raise ConfigError(f"device: {config.device} does not serve this model: {error}") from error
    if config.attention_backend == "flashinfer" and (reason := why_not(spec, device)):
        raise ConfigError(f"attention_backend: flashinfer is not used: {reason}")


def _runner(model: Model, num_pages: int, config: WorkerConfig, limits: Limits) -> EngineRunner:
    if config.device not in KERNEL_DEVICES:
        return Runner(model, num_pages, config.page_size, sorted(limits.eos_token_ids))
    # A CPU worker has no need of Triton.
    from pdserve.engine.attention_flashinfer import FlashInferPrompts  # noqa: PLC0415
    from pdserve.engine.attention_triton import attention_spec  # noqa: PLC0415
    from pdserve.engine.runner_cuda import CudaRunner  # noqa: PLC0415

    prompts = None
    if config.attention_backend == "flashinfer":
        spec = attention_spec(model.config, config.page_size, num_pages, model.dtype)
        prompts = FlashInferPrompts(spec, model.device)
    runner = CudaRunner(model, num_pages, config.page_size, limits, prompts)
    runner.capture()
    return runner


def _max_model_len(config: WorkerConfig, model_limit: int, pool_tokens: int) -> int:
    """Return the longest sequence: what was asked for if model and pages allow it, else what they allow."""
    asked = config.max_model_len
    if asked is None:
        return min(model_limit, pool_tokens)
    if asked > model_limit:
        raise ConfigError(f"max_model_len: {asked} is over the model's limit of {model_limit}")
    if asked > pool_tokens:
        raise ConfigError(f"max_model_len: {asked} is over the {pool_tokens} tokens that the KV pages hold")
    return asked


def device_name(device: str, cpu_info: str) -> str:
    """Return the name by which routers learn what steps cost: the model of the GPU or the CPU.

    Triton's interpreter has another one, since it is far slower.
    """
    if device == "cuda":
        return torch.cuda.get_device_name(torch.cuda.current_device())[:MAX_CHARACTERS]
    name = cpu_name(cpu_info)[:MAX_CHARACTERS]
    return f"interpreter, {name}" if device == "interpreter" else name


def check_network(config: WorkerConfig) -> None:
    """Raise ConfigError where pages could not travel as configured."""
    if config.mover == "nixl":
        if not any(map(find_spec, ("nixl_cu13", "nixl_cu12"))):
            raise not_installed("nixl_cu12")
        _network(config).settings()


def build_mover(config: WorkerConfig, me: Peer, region: Region, on_stopped: OnStopped, secret: bytes) -> Mover:
    """Start the configured mover."""
    if config.test_fail_copies and config.mover != "nixl":
        raise ConfigError(f"test_fail_copies: mover {config.mover} does not know how to fail on purpose")
    return Mover(_backend(config, me, region, secret), on_stopped)


def kv_region(engine: Engine) -> Region:
    """Return an engine's pages: page i is row i of the view."""
    kv = engine.runner.kv
    view = kv.view(torch.uint8).view(len(kv), -1)
    return Region.of(view.numpy()) if view.device.type == "cpu" else device_region(view)


def _backend(config: WorkerConfig, me: Peer, region: Region, secret: bytes) -> Backend:
    # The library of the backend that is not configured may be missing.
    if config.mover == "nixl":
        from pdserve.kvtransfer.backends.nixl import NixlBackend  # noqa: PLC0415

        return NixlBackend(me, region, _network(config), config.test_fail_copies)
    from pdserve.kvtransfer.backends.collective import CollectiveBackend  # noqa: PLC0415
    from pdserve.kvtransfer.backends.pairing import Meeting  # noqa: PLC0415

    meeting = Meeting(secret, config.handoff_host, split_address(config.handoff_advertise or "")[0])
    staged = config.device in KERNEL_DEVICES  # an engine in the interpreter does as one on a GPU
    return CollectiveBackend(me, region, meeting, staged=staged)


def _network(config: WorkerConfig) -> Network:
    return Network(config.handoff_host, config.handoff_rdma_devices, tcp_only=config.handoff_transport == "tcp")
