"""Loads what guesses beside a worker's model; refuses what no test has compared.

That is a draft model, with as many pages as the worker's, or a head, whose KV lies in those.
"""

from dataclasses import replace
from pathlib import Path

import torch

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import Checkpoint, ChosenQuantization, naming, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.drafting import Drafter, ModelDrafter
from pdserve.engine.guesses import DraftsBy
from pdserve.engine.head_drafting import HeadDrafter
from pdserve.engine.runner import EngineRunner, Runner
from pdserve.engine.scheduler import Limits
from pdserve.executor.form import DTYPES, Form, choose_form, load_form, untried_kind, weight_bytes
from pdserve.executor.head_files import HeadFiles, MtpFiles, open_head, open_mtp
from pdserve.executor.memory import available_bytes
from pdserve.model.loading import needed_weights
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import WorkerConfig

_KEY = "speculative_config.model"
_COMPUTED = 2  # raised where heads come to compute KV otherwise: pages of other numbers are not paired

Drafts = Form | HeadFiles | MtpFiles | None  # a draft model, a head, or neither


def open_drafts(config: WorkerConfig, checkpoint: Checkpoint, weights_hash: str = "") -> Drafts:
    """Open what is configured to guess; ConfigError if it cannot do so for the worker's model.

    weights_hash: of a draft model, whose files are else read for it.
    """
    given = config.speculative_config
    if given is not None and checkpoint.config.has_states:
        raise ConfigError("speculative_config: this model's layers keep a state, which takes no guess back")
    if given is None or given.looks_up:
        return None
    if given.method == "mtp":
        try:
            return open_mtp(checkpoint)
        except ConfigError as error:
            raise ConfigError(f"speculative_config.method: mtp: {error}") from error
    assert given.model is not None, "settings ask for it"
    try:
        path = resolve_model(given.model)
        if given.method == "eagle3":
            return open_head(path, checkpoint.config)
        return _opened(config, path, checkpoint, weights_hash)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {error}") from error


def with_room(checkpoint: Checkpoint, drafts: Drafts) -> Checkpoint:
    """Return the worker's model with room for KV of a head in its pages, if there is one."""
    if not isinstance(drafts, HeadFiles | MtpFiles):
        return checkpoint
    return replace(checkpoint, config=replace(checkpoint.config, num_head_layers=1))


def limits_with(limits: Limits, drafts: Drafts) -> Limits:
    """Return a worker's limits with what guesses, and for how long sequences.

    Heads say as their `max_position_embeddings` on what lengths they were trained, and are used beyond.
    """
    if drafts is None:
        return limits
    if isinstance(drafts, HeadFiles | MtpFiles):
        return replace(limits, guesser=DraftsBy(drafts.source, limits.max_model_len))
    longest = min(drafts.checkpoint.config.max_position_embeddings, limits.max_model_len)
    return replace(limits, guesser=DraftsBy(DraftSource.DRAFT_MODEL, longest))


def _opened(config: WorkerConfig, path: Path, checkpoint: Checkpoint, weights_hash: str) -> Form:
    """Open a draft model."""
    draft = open_checkpoint(path)
    form = choose_form(config, draft, weights_hash)
    sizes = draft.config.vocab_size, checkpoint.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(f"{draft.path} has {sizes[0]} tokens, and the model that it guesses for {sizes[1]}")
    if not draft.tokenizer().has_tokens_of(checkpoint.tokenizer()):
        raise ConfigError(f"{draft.path} has other tokens than the model that it guesses for")
    has_windows = any(window is not None for window in draft.config.windows)
    if kind := untried_kind(draft.config, windows=has_windows, experts=draft.config.design.has_experts):
        raise ConfigError(f"{draft.path} has {kind}; such a model does not draft yet")
    return form


def weights_hash(form: Form, drafts: Drafts) -> str:
    """Return the name of what fills pages: the worker's model, whose form this is, and a head."""
    own = f"{form.weights_hash} dtype {form.dtype}"
    return f"{own} head {_COMPUTED} {drafts.fingerprint}" if isinstance(drafts, HeadFiles | MtpFiles) else own


def draft_bytes(drafts: Drafts, quantization: ChosenQuantization, dtype: str) -> tuple[int, int]:
    """Return the bytes of what guesses, nearly: of its weights, and of KV of a token in pages that only it has.

    quantization, dtype: of the model that it guesses for.
    """
    if drafts is None:
        return 0, 0
    if not isinstance(drafts, Form):
        return weight_bytes(drafts.held(quantization), dtype, "cpu"), 0
    shape = drafts.checkpoint.config
    weights = needed_weights(shape, weights_in_form(drafts.checkpoint, drafts.quantization))
    row_bytes = shape.kv_parts * shape.num_kv_heads * shape.head_dim * DTYPES[drafts.dtype].itemsize
    return weight_bytes(weights, drafts.dtype, "cpu"), shape.num_layers * row_bytes


def load_drafter(
    config: WorkerConfig, drafts: Drafts, form: Form, runner: EngineRunner, layout: KvLayout, limits: Limits
) -> Drafter | None:
    """Load what guesses beside a worker's model, if anything does. form, layout: of that model.

    The memory of the worker's pages is not taken yet, so it is counted here.
    """
    if drafts is None:
        return None
    held_bytes, token_bytes = draft_bytes(drafts, form.quantization, form.dtype)
    num_pages, page_size = len(runner.kv), layout.page_size
    needed = held_bytes + num_pages * page_size * token_bytes
    left = available_bytes() - layout.memory_bytes(num_pages, config.max_num_seqs)
    if isinstance(drafts, Form):
        with naming(f"{_KEY}: {drafts.checkpoint.path}"):
            _check_memory(needed, left)
            model = load_form(config, drafts, torch.device("cpu"), None)
            return ModelDrafter(Runner(model, num_pages, page_size, sorted(limits.eos_token_ids)))
    assert isinstance(runner, Runner), "settings refuse other devices"
    with naming("speculative_config.method: mtp" if isinstance(drafts, MtpFiles) else f"{_KEY}: {drafts.path}"):
        _check_memory(needed, left)
        head = drafts.load(runner.model, form.quantization, config.quantized_inputs)
        return HeadDrafter(head, runner, sorted(limits.eos_token_ids))


def _check_memory(needed: int, left: int) -> None:
    """Raise ConfigError where what guesses takes more than is left: the kernel would end a worker that serves."""
    if needed > left:
        raise ConfigError(f"takes {needed} bytes, and {left} are left beside the model and its KV pages")
