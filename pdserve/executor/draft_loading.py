"""Loads what guesses beside a worker's model; refuses what no test has compared.

That is a draft model, with as many pages as the worker's, or a head, whose KV lies in those.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import Checkpoint, ChosenQuantization, naming, weights_in_form
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.drafting import Drafter, ModelDrafter, limits_of_passes
from pdserve.engine.guesses import AnswerLookup, DraftsBy, NgramLookup
from pdserve.engine.head_drafting import HeadDrafter, HeadPasses, HeadRunner
from pdserve.engine.recent_answers import SHORTEST
from pdserve.engine.runner import EngineRunner, Runner
from pdserve.engine.scheduler import Limits
from pdserve.executor.form import DTYPES, KERNEL_DEVICES, Form, choose_form, load_form, untried_kind, weight_bytes
from pdserve.executor.head_files import HeadFiles, MtpFiles, open_head, open_mtp
from pdserve.executor.kernel_checks import check_kernels
from pdserve.executor.memory import available_bytes
from pdserve.model.config import ModelConfig
from pdserve.model.eagle3 import Eagle3Head
from pdserve.model.family import Model
from pdserve.model.layer_groups import layer_groups
from pdserve.model.loading import needed_weights
from pdserve.model.mtp import MtpHead
from pdserve.model.parallel import Collective
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.kvlayout import KvLayout
from pdserve.settings.config import Device, WorkerConfig
from pdserve.settings.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from pdserve.engine.head_cuda import CudaHead

_KEY = "speculative_config.model"
_COMPUTED = 3  # raised where heads come to compute KV otherwise: pages of other numbers are not paired

_DIVIDED = tuple((dtype, "none") for dtype in ("float32", "bfloat16", "float16"))  # of a head in parts of each rank
_COMPARED = (  # of a model in several ranks: type and codes beside which a head guesses what it does beside one
    *((dtype, "none") for dtype in ("float32", "bfloat16", "float16")),
    *((dtype, codes) for dtype in ("float32", "bfloat16") for codes in ("int8", "int4")),
)
_COMPARED_HEADS = (*_COMPARED, *(("bfloat16", codes) for codes in ("fp8", "awq")))  # of EAGLE-3

Drafts = Form | HeadFiles | MtpFiles | None  # a draft model, a head, or neither
LoadedDrafts = Model | Eagle3Head | MtpHead  # loaded


def open_drafts(config: WorkerConfig, checkpoint: Checkpoint, weights_hash: str = "") -> Drafts:
    """Open what is configured to guess; ConfigError if it cannot do so for the worker's model.

    weights_hash: of a draft model, whose files are else read for it.
    """
    given = config.speculative_config
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
            head = open_head(path, checkpoint.config)
            _check_kernels(config, head.config.model, checkpoint)
            return head
        return _opened(config, path, checkpoint, weights_hash)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {error}") from error


def open_divided(config: WorkerConfig, checkpoint: Checkpoint) -> Drafts:
    """Return the head of which each of a worker's ranks has a part; None: there is none."""
    guessed = config.speculative_config
    return None if guessed is None or guessed.method == "draft_model" else open_drafts(config, checkpoint)


def choose_forms(config: WorkerConfig, checkpoint: Checkpoint) -> tuple[Form, Drafts]:
    """Return the forms of a worker's model and of what guesses for it; ConfigError if there are none."""
    drafts = open_drafts(config, checkpoint)
    form = choose_form(config, with_room(checkpoint, drafts))
    return form, among_ranks(drafts, config, form.checkpoint, form.dtype, form.quantization)


def among_ranks(
    drafts: Drafts, config: WorkerConfig, checkpoint: Checkpoint, dtype: str, quantization: ChosenQuantization
) -> Drafts:
    """Return what guesses as the first of a model's ranks has it; ConfigError where no test has compared it so.

    checkpoint, dtype, quantization: of the model, whose whole embedding a head takes, and a module its head as well.
    Ranks with a device each divide a head as they do the model.
    """
    if config.degrees.tensor == 1 or not isinstance(drafts, HeadFiles | MtpFiles):
        return drafts
    is_divided = config.device in KERNEL_DEVICES
    compared = _COMPARED if isinstance(drafts, MtpFiles) else _COMPARED_HEADS
    if (dtype, quantization) not in (_DIVIDED if is_divided else compared):
        form, method = f"dtype {dtype} and quantization {quantization}", drafts.source.value
        raise ConfigError(f"speculative_config.method: {method} is not served beside several ranks with {form} yet")
    return drafts if is_divided else drafts.with_matrices_of(checkpoint)


def with_room(checkpoint: Checkpoint, drafts: Drafts) -> Checkpoint:
    """Return the worker's model with room for KV of a head in its pages, if there is one."""
    if not isinstance(drafts, HeadFiles | MtpFiles):
        return checkpoint
    unlike = "heads of two sizes" if checkpoint.config.has_unlike_heads else None
    if kind := unlike or checkpoint.config.shared_between_layers:
        method = f"speculative_config.method: {drafts.source.value}"
        raise ConfigError(f"{method} is not served beside a model with {kind} yet")
    return replace(checkpoint, config=replace(checkpoint.config, num_head_layers=1))


def lookup_of(guessed: SpeculativeConfig) -> NgramLookup | None:
    """Return how guesses are looked up; None: the runner makes them."""
    match guessed.method:
        case "ngram":
            return NgramLookup(guessed.prompt_lookup_min, guessed.prompt_lookup_max)
        case "suffix":
            depth, most_answers = guessed.suffix_decoding_max_tree_depth, guessed.suffix_decoding_max_cached_requests
            shares = guessed.suffix_decoding_min_token_prob, guessed.suffix_decoding_max_spec_factor
            return NgramLookup(SHORTEST, depth, AnswerLookup(depth, most_answers, *shares))
        case _:
            return None


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
    if kind := untried_kind(draft.config, windows=has_windows, experts=bool(draft.config.design.mixtures)):
        raise ConfigError(f"{draft.path} has {kind}; such a model does not draft yet")
    _check_kernels(config, draft.config, checkpoint)
    return form


def _check_kernels(config: WorkerConfig, guessing: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where the kernels do not serve what guesses, in pages of the worker's model."""
    if config.device in KERNEL_DEVICES:
        first, *_ = layer_groups(checkpoint.config, config.page_size, powers_of_two=True)
        check_kernels(config.device, guessing, first.page_size, DTYPES.get(config.dtype, torch.bfloat16))


def weights_hash(form: Form, drafts: Drafts) -> str:
    """Return the name of what fills pages: the worker's model, whose form this is, and a head."""
    own = f"{form.weights_hash} dtype {form.dtype}"
    return f"{own} head {_COMPUTED} {drafts.fingerprint}" if isinstance(drafts, HeadFiles | MtpFiles) else own


def draft_bytes(drafts: Drafts, quantization: ChosenQuantization, dtype: str, device: Device) -> tuple[int, int]:
    """Return the bytes of what guesses, nearly: of its weights, and of KV of a token in pages that only it has.

    quantization, dtype: of the model that it guesses for.
    """
    if drafts is None:
        return 0, 0
    if not isinstance(drafts, Form):
        return weight_bytes(drafts.held(quantization), dtype, device), 0
    weights = needed_weights(drafts.checkpoint.config, weights_in_form(drafts.checkpoint, drafts.quantization, device))
    return weight_bytes(weights, drafts.dtype, device), _token_bytes(drafts)


def _token_bytes(draft: Form) -> int:
    """Return the bytes of a draft model's KV of a token."""
    shape = draft.checkpoint.config
    row_bytes = shape.kv_parts * shape.num_kv_heads * shape.head_dim * DTYPES[draft.dtype].itemsize
    return shape.num_layers * row_bytes


def bytes_beside(
    model: Model, drafts: Drafts, guessing: LoadedDrafts | None, limits: Limits, layout: KvLayout
) -> tuple[int, int]:
    """Return what guessing for a model takes at most on its GPU, beside weights: for passes, and more for each page."""
    if guessing is None:
        return 0, 0
    from pdserve.engine.gpu_memory import head_bytes, step_bytes  # noqa: PLC0415 - a CPU worker has no need of Triton

    if isinstance(drafts, Form) and not isinstance(guessing, Eagle3Head | MtpHead):
        return step_bytes(guessing, limits_of_passes(limits)), layout.page_size * _token_bytes(drafts)
    return head_bytes(model, limits), 0


def load_guessing(
    config: WorkerConfig,
    drafts: Drafts,
    form: Form,
    model: Model,
    pages: tuple[int | None, KvLayout],
    ranks: Collective | None = None,
) -> LoadedDrafts | None:
    """Load what guesses beside a worker's model, if anything does. form: of that model.

    pages: how many the worker has, and their layout; None: those that fit on the GPU beside what is loaded. On a CPU
    the memory of pages is not taken yet, so it is counted here. ranks: of which each loads a part of a head.
    """
    if drafts is None:
        return None
    num_pages, layout = pages
    path = drafts.path if isinstance(drafts, HeadFiles) else drafts.checkpoint.path
    with naming("speculative_config.method: mtp" if isinstance(drafts, MtpFiles) else f"{_KEY}: {path}"):
        if num_pages is not None and model.device.type == "cpu":
            held_bytes, token_bytes = draft_bytes(drafts, form.quantization, form.dtype, config.device)
            needed = held_bytes + num_pages * layout.page_size * token_bytes
            _check_memory(needed, available_bytes() - layout.memory_bytes(num_pages, config.max_num_seqs))
        if isinstance(drafts, Form):
            return load_form(config, drafts, model.device, None)
        return drafts.load(model, form.quantization, config.quantized_inputs, ranks)


def drafter_of(
    guessing: LoadedDrafts | None,
    runner: EngineRunner,
    page_size: int,
    limits: Limits,
    among: Callable[["CudaHead"], HeadPasses] | None = None,
) -> Drafter | None:
    """Return what guesses beside a runner, before its first step. page_size: of the first group of its layers.

    among: leads other ranks through the passes of a head of which each has a part.
    """
    if guessing is None:
        return None
    eos_token_ids, num_pages = sorted(limits.eos_token_ids), len(runner.kv)
    if isinstance(runner, Runner):
        if isinstance(guessing, Eagle3Head | MtpHead):
            return HeadDrafter(HeadRunner(guessing, runner, eos_token_ids))
        return ModelDrafter(Runner(guessing, num_pages, page_size, eos_token_ids))
    # A CPU worker has no need of Triton.
    from pdserve.engine.head_cuda import CudaHead  # noqa: PLC0415
    from pdserve.engine.runner_cuda import CudaRunner  # noqa: PLC0415

    if isinstance(guessing, Eagle3Head | MtpHead):
        assert isinstance(runner, CudaRunner), "there are no others"
        head = CudaHead(guessing, runner, limits)
        led: HeadPasses = head if among is None else among(head)
        drafter = HeadDrafter(led)
        head.capture(led.run)
        head.follow(runner, drafter.attempt if among is None else None)
        return drafter
    passes = CudaRunner(guessing, num_pages, page_size, limits_of_passes(limits))
    passes.capture()
    return ModelDrafter(passes)


def follow_head(guessing: LoadedDrafts | None, runner: EngineRunner, limits: Limits) -> "CudaHead | None":
    """Return this rank's part of a head, which the first rank leads, beside its runner and before its first step."""
    if guessing is None:
        return None
    # A CPU worker has no need of Triton.
    from pdserve.engine.head_cuda import CudaHead  # noqa: PLC0415
    from pdserve.engine.runner_cuda import CudaRunner  # noqa: PLC0415

    assert isinstance(guessing, Eagle3Head | MtpHead), "the first rank has a draft model alone"
    assert isinstance(runner, CudaRunner), "others do not divide heads"
    head = CudaHead(guessing, runner, limits)
    head.follow(runner)
    return head


def _check_memory(needed: int, left: int) -> None:
    """Raise ConfigError where what guesses takes more than is left: the kernel would end a worker that serves."""
    if needed > left:
        raise ConfigError(f"takes {needed} bytes, and {left} are left beside the model and its KV pages")
