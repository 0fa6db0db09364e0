"""Turns a worker's configuration into an engine: opens the checkpoint, loads the model, lays out the pages."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.config import WorkerConfig
from pdserve.engine.kvcache import KvCache
from pdserve.engine.prefix import PrefixNames
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.errors import ConfigError
from pdserve.kvlayout import KvLayout
from pdserve.model.dummy import dummy_weights
from pdserve.model.loading import load_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with its pages."""

    runner: Runner
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
    if config.max_num_seqs > config.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs: {config.max_num_seqs} is over max_num_batched_tokens {config.max_num_batched_tokens}"
        )
    model_config = checkpoint.config
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    layout = KvLayout(
        weights_hash=f"{checkpoint.fingerprint} {config.load_format} {config.seed}",
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        dtype=dtype,
    )
    num_pages = config.num_pages or config.kv_cache_memory_bytes // layout.page_bytes
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=_max_model_len(config, model_config.max_position_embeddings, num_pages * config.page_size),
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
    )
    dummy = config.load_format == "dummy"
    weights = dummy_weights(model_config, config.seed) if dummy else checkpoint.weights()
    model = load_model(model_config, weights, DTYPES[dtype], progress)
    names = PrefixNames(hmac.digest(secret, b"prefix cache", "sha256"), layout.weights_hash, config.page_size)
    return Engine(
        runner=Runner(model, num_pages, config.page_size, eos_token_ids=checkpoint.eos_token_ids),
        scheduler=Scheduler(KvCache(num_pages, config.page_size, names), limits),
        layout=layout,
        vocab_size=model_config.vocab_size,
        model_name=config.served_model_name or checkpoint.name,
    )


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
