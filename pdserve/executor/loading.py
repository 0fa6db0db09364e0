"""Loads a model on the device that a worker computes with, and lays out the pages that fit beside it."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdserve.base.errors import ConfigError
from pdserve.base.roles import lacks_pages
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.engine.drafting import Drafter
from pdserve.engine.runner import EngineRunner, RankPages, Runner, zeroed
from pdserve.engine.scheduler import Limits
from pdserve.executor.device_names import MAX_CHARACTERS, device_name
from pdserve.executor.device_ranks import Fitting, load_on_devices
from pdserve.executor.draft_loading import (
    Drafts,
    LoadedDrafts,
    bytes_beside,
    choose_forms,
    drafter_of,
    limits_with,
    load_guessing,
    lookup_of,
    weights_hash,
)
from pdserve.executor.executor import Executor
from pdserve.executor.followers import Followers
from pdserve.executor.form import DTYPES, KERNEL_DEVICES, Form, Progress, check_inputs, load_form
from pdserve.executor.kernel_checks import check_kernels, check_use
from pdserve.executor.layouts import layout_of
from pdserve.executor.local import LocalExecutor
from pdserve.executor.memory import available_bytes
from pdserve.executor.no_gpu import driver_version, why_no_gpu
from pdserve.executor.rank_memory import num_copies, own_pages, rank_page_bytes, region_of
from pdserve.executor.ranked import RankedExecutor
from pdserve.executor.threads import Seat
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.family import Model
from pdserve.model.sharding import check_divides
from pdserve.model.weights import Rank
from pdserve.protocol.kvlayout import KvCode, KvLayout, coded_as
from pdserve.settings.config import WorkerConfig
from pdserve.settings.processor import allocator_problem, read_cpu_info

if TYPE_CHECKING:
    from pdserve.executor.joining import Nodes

Places = tuple[Seat | None, "Nodes | None"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to compute, and what its worker has to know of it."""

    executor: Executor
    layout: KvLayout
    limits: Limits


def load(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    progress: Progress,
    seat: Seat | None = None,
    nodes: "Nodes | None" = None,
) -> Loaded:
    """Load the weights and set up the pages. Takes seconds to minutes: not for an event loop. Close the executor."""
    thread = ThreadPoolExecutor(1, "engine")
    try:
        return thread.submit(_load, config, checkpoint, progress, (seat, nodes), thread).result()
    except BaseException:
        thread.shutdown()
        raise


def _load(
    config: WorkerConfig, checkpoint: Checkpoint, progress: Progress, places: Places, thread: ThreadPoolExecutor
) -> Loaded:
    seat, nodes = places
    device = engine_device(config)
    form, drafts = choose_forms(config, checkpoint)
    checkpoint = form.checkpoint
    if config.max_num_seqs > max(config.step_tokens.values()):
        raise ConfigError(
            f"max_num_seqs: {config.max_num_seqs} is over max_num_batched_tokens {config.max_num_batched_tokens}"
        )
    check_divides(checkpoint.config, config.degrees)
    layout = layout_of(config, checkpoint.config, form.dtype, weights_hash(form, drafts))
    code = coded_as(layout.dtype)
    if config.device in KERNEL_DEVICES:
        specs = check_kernels(config.device, checkpoint.config, config.page_size, DTYPES[form.dtype], code)
        check_use(config, checkpoint.config, specs, device)
    num_pages = pages_asked_for(config, layout, device)
    fitting = fitting_of(config, (checkpoint, drafts), layout, num_pages)
    if num_pages is not None:
        fitting.limits(num_pages)  # refuses what does not fit before the weights are read
    if config.degrees.num_ranks > 1 and config.device in KERNEL_DEVICES:
        among = _name_of_ranks(config), nodes
        return Loaded(*load_on_devices(config, (form, drafts), fitting, thread, among, progress))
    if config.degrees.num_ranks > 1 and num_pages is not None:
        limits = fitting.limits(num_pages)
        sizes = layout, limits, num_pages
        return Loaded(_ranked(config, (form, drafts), sizes, nodes, thread, progress), layout, limits)
    model = load_form(config, form, device, None, progress)
    check_inputs(config, model)
    if num_pages is not None and device.type == "cpu":
        _check_memory(config, layout.memory_bytes(num_pages, config.max_num_seqs))
    guessing = load_guessing(config, drafts, form, model, (num_pages, layout))
    if num_pages is None:
        limits = limits_with(limits_up_to(_longest(config, model), config, checkpoint), drafts)
        beside = bytes_beside(model, drafts, guessing, limits, layout)
        num_pages = _pages_beside(model, config, checkpoint, layout.page_bytes, beside)
    limits = fitting.limits(num_pages)
    own = None
    if config.rank_memory == "own":
        own = RankPages(zeroed((num_pages * layout.page_bytes,), torch.uint8, device), are_own=True)
    runner, drafter = _runner((model, guessing), (num_pages, layout, own), config, limits, code)
    if seat is not None and not isinstance(loaded := library(), Missing):
        seat.use(loaded)
    name = device_name(config.device, read_cpu_info())
    region = None if own is None else region_of(own.memory, own_pages(Rank(), layout))
    return Loaded(LocalExecutor(runner, thread, name, config.test_step_s, drafter, region), layout, limits)


def _ranked(
    config: WorkerConfig,
    forms: tuple[Form, Drafts],
    sizes: tuple[KvLayout, Limits, int],
    nodes: "Nodes | None",
    thread: ThreadPoolExecutor,
    progress: Progress,
) -> RankedExecutor:
    """Start the other ranks, and load this one beside them. forms: with what guesses, which this rank has alone."""
    (form, drafts), (layout, limits, num_pages) = forms, sizes
    followers = Followers(config, form, num_pages, layout, nodes=nodes)
    try:
        model = load_form(config, form, torch.device("cpu"), followers.ranks, progress)
        check_inputs(config, model)
        assert followers.memory is not None, "ranks on CPUs have the host's"
        are_own = config.rank_memory == "own"
        memory = RankPages(followers.memory, are_own, are_recorded=nodes is None, keep=followers.keep)
        code = coded_as(layout.dtype)
        runner = Runner(model, num_pages, config.page_size, sorted(limits.eos_token_ids), memory, code)
        followers.meet()
        followers.meet_nodes(num_pages)
        num_bytes = num_copies(layout, config.degrees) * layout.memory_bytes(num_pages, config.max_num_seqs)
        _check_memory(config, num_bytes)  # beside all of their parts
        guessing = load_guessing(config, drafts, form, model, (num_pages, layout))
        drafter = drafter_of(guessing, runner, layout.page_size, limits)
        return RankedExecutor(runner, followers, thread, _name_of_ranks(config), config.test_step_s, drafter)
    except BaseException:
        followers.close()
        raise


def fitting_of(
    config: WorkerConfig, opened: tuple[Checkpoint, Drafts], layout: KvLayout, num_pages: int | None
) -> Fitting:
    """Return what settings make of the pages. opened: the model, and what guesses."""
    checkpoint, drafts = opened

    def limits(num_pages: int) -> Limits:
        return limits_with(_limits(config, checkpoint, layout, num_pages), drafts)

    def room(model: Model, guessing: LoadedDrafts | None) -> int:
        longest = limits_with(limits_up_to(_longest(config, model), config, checkpoint), drafts)
        beside = bytes_beside(model, drafts, guessing, longest, layout)
        return _pages_beside(model, config, checkpoint, rank_page_bytes(layout, model.rank), beside)

    return Fitting(layout, num_pages, limits, room)


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


def _limits(config: WorkerConfig, checkpoint: Checkpoint, layout: KvLayout, num_pages: int) -> Limits:
    model_limit, step_tokens = checkpoint.config.max_position_embeddings, max(config.step_tokens.values())
    max_model_len = _max_model_len(config, model_limit, layout.paging.most_tokens(num_pages, step_tokens, model_limit))
    if lacks := lacks_pages(config.role, num_pages, layout.paging.most_pages(max_model_len, step_tokens)):
        raise ConfigError(f"role: {lacks}: lower max_model_len, or raise num_pages")
    return limits_up_to(max_model_len, config, checkpoint)


def limits_up_to(max_model_len: int, config: WorkerConfig, checkpoint: Checkpoint) -> Limits:
    """Return the limits of a worker whose sequences have at most so many tokens."""
    guessed = config.speculative_config
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.step_tokens.values()),
        max_model_len=max_model_len,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
        can_pool=config.device not in KERNEL_DEVICES,  # their runner was not compared with anything yet
        num_speculative_tokens=0 if guessed is None else guessed.num_speculative_tokens,
        guesser=None if guessed is None else lookup_of(guessed),
    )


def pages_asked_for(config: WorkerConfig, layout: KvLayout, device: torch.device) -> int | None:
    """Return how many pages the configuration asks for; None: as many as a GPU has room for. ConfigError if it is 0."""
    if config.num_pages is not None:
        return config.num_pages
    if device.type == "cuda" and "kv_cache_memory_bytes" not in config.model_fields_set:
        return None
    page_bytes = num_copies(layout, config.degrees) * layout.page_bytes
    num_pages = config.kv_cache_memory_bytes // page_bytes
    if num_pages == 0:
        given = config.kv_cache_memory_bytes
        raise ConfigError(f"kv_cache_memory_bytes: {given} have no room for a page of {page_bytes} bytes")
    return num_pages


def _check_memory(config: WorkerConfig, num_bytes: int) -> None:
    """Raise ConfigError where these take more memory than there is: the kernel would end a worker that serves.

    num_bytes: of pages, and of the states that a step copies.
    """
    available = available_bytes()
    if num_bytes > available:
        field = "kv_cache_memory_bytes" if config.num_pages is None else "num_pages"
        raise ConfigError(f"{field}: KV pages take {num_bytes} bytes, and {available} are left beside the model")


def _longest(config: WorkerConfig, model: Model) -> int:
    return config.max_model_len or model.config.max_position_embeddings


def _pages_beside(
    model: Model, config: WorkerConfig, checkpoint: Checkpoint, page_bytes: int, guessing: tuple[int, int] = (0, 0)
) -> int:
    """Return how many pages fit on the model's GPU beside it and a step.

    guessing: bytes that it takes, and more for each page.
    """
    # A CPU worker has no need of Triton.
    from pdserve.engine.attention_flashinfer import WORKSPACE_BYTES  # noqa: PLC0415
    from pdserve.engine.gpu_memory import GpuMemory, step_bytes  # noqa: PLC0415

    memory = GpuMemory.of(model.device)
    needed = guessing[0] + step_bytes(model, limits_up_to(_longest(config, model), config, checkpoint))
    needed += WORKSPACE_BYTES if config.attention_backend == "flashinfer" else 0
    num_pages = memory.pages_that_fit(config.gpu_memory_utilization, needed, page_bytes + guessing[1])
    if num_pages == 0:
        share = f"{config.gpu_memory_utilization} of {memory.total} bytes, {memory.free} of them free"
        page = f"a page of {page_bytes} bytes beside {memory.own + needed}"
        raise ConfigError(f"gpu_memory_utilization: {share}, leaves no room for {page}")
    return num_pages


def _runner(
    models: tuple[Model, LoadedDrafts | None],
    pages: tuple[int, KvLayout, RankPages | None],
    config: WorkerConfig,
    limits: Limits,
    code: KvCode | None,
) -> tuple[EngineRunner, Drafter | None]:
    """Return what computes a model's steps, and what guesses beside it. models: with what is loaded to guess."""
    (model, guessing), (num_pages, layout, own) = models, pages
    if config.device not in KERNEL_DEVICES:
        on_cpu = Runner(model, num_pages, config.page_size, sorted(limits.eos_token_ids), own, code)
        return on_cpu, drafter_of(guessing, on_cpu, layout.page_size, limits)
    # A CPU worker has no need of Triton.
    from pdserve.engine.attention_flashinfer import FlashInferPrompts  # noqa: PLC0415
    from pdserve.engine.attention_triton import attention_spec  # noqa: PLC0415
    from pdserve.engine.device_pages import DevicePages  # noqa: PLC0415
    from pdserve.engine.runner_cuda import CudaRunner  # noqa: PLC0415

    prompts = None
    if config.attention_backend == "flashinfer":
        (scores,) = {each.scores for each in model.config.design.attentions if each}  # `check_use` has seen it
        rows = KvRows(model.config.head_dim, model.dtype)
        spec = attention_spec(model.config, scores, config.page_size, num_pages, rows)
        prompts = FlashInferPrompts(spec, model.device)
    kept = DevicePages(None if own is None else own.memory, code=code)
    runner = CudaRunner(model, num_pages, config.page_size, limits, prompts, kept)
    drafter = drafter_of(guessing, runner, layout.page_size, limits)
    runner.capture()
    return runner, drafter


def _max_model_len(config: WorkerConfig, model_limit: int, pool_tokens: int) -> int:
    """Return the longest sequence: what was asked for if model and pages allow it, else what they allow."""
    asked = config.max_model_len
    if pool_tokens == 0:
        raise ConfigError("num_pages: the KV pages have no room for a token in each group of layers")
    if asked is None:
        return min(model_limit, pool_tokens)
    if asked > model_limit:
        raise ConfigError(f"max_model_len: {asked} is over the model's limit of {model_limit}")
    if asked > pool_tokens:
        raise ConfigError(f"max_model_len: {asked} is over the {pool_tokens} tokens that the KV pages hold")
    return asked


def _name_of_ranks(config: WorkerConfig) -> str:
    return f"{config.degrees}, {device_name(config.device, read_cpu_info())}"[:MAX_CHARACTERS]
