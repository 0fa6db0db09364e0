"""Loads a draft model beside a worker's model, with as many pages; refuses what no test has compared."""

import torch

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.drafting import Drafter
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits
from pdserve.executor.form import DTYPES, Form, choose_form, load_form, untried_kind, weight_bytes
from pdserve.executor.memory import available_bytes
from pdserve.model.loading import needed_weights
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import WorkerConfig

_KEY = "speculative_config.model"


def open_draft_model(config: WorkerConfig, checkpoint: Checkpoint) -> Form | None:
    """Open the configured draft model, if there is one; ConfigError if it cannot draft for the worker's model."""
    if config.speculative_config is None or config.speculative_config.model is None:
        return None
    try:
        draft = open_checkpoint(resolve_model(config.speculative_config.model))
        form = choose_form(config, draft)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    sizes = draft.config.vocab_size, checkpoint.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(f"{_KEY}: {draft.path} has {sizes[0]} tokens, and the model that it guesses for {sizes[1]}")
    if not draft.tokenizer().has_tokens_of(checkpoint.tokenizer()):
        raise ConfigError(f"{_KEY}: {draft.path} has other tokens than the model that it guesses for")
    has_windows = any(window is not None for window in draft.config.windows)
    if kind := untried_kind(draft.config, windows=has_windows, experts=draft.config.design.has_experts):
        raise ConfigError(f"{_KEY}: {draft.path} has {kind}; such a model does not draft yet")
    return form


def load_drafter(config: WorkerConfig, form: Form, layout: KvLayout, num_pages: int, limits: Limits) -> Drafter:
    """Load a draft model. layout, num_pages: of the worker's pool, whose memory is not taken yet."""
    shape, page_size = form.checkpoint.config, layout.page_size
    weights = needed_weights(shape, form.checkpoint.weights())
    row_bytes = shape.kv_parts * shape.num_kv_heads * shape.head_dim * DTYPES[form.dtype].itemsize
    pool_bytes = num_pages * page_size * shape.num_layers * row_bytes
    needed = pool_bytes + weight_bytes(form.checkpoint, weights, form.quantization, form.dtype)
    left = available_bytes() - layout.memory_bytes(num_pages, config.max_num_seqs)
    if needed > left:
        raise ConfigError(f"{_KEY}: weights and KV pages take {needed} bytes, and {left} are left beside the model's")
    model = load_form(config, form, torch.device("cpu"), None)
    return Drafter(Runner(model, num_pages, page_size, sorted(limits.eos_token_ids)))
