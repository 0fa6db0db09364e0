"""What a model needs, and what of it fits on this machine: from the headers of its files, before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import check_model
from pdserve.executor.draft_loading import among_ranks, draft_bytes, open_drafts, with_room
from pdserve.executor.form import DTYPES, KERNEL_DEVICES, in_parts, weight_bytes
from pdserve.executor.kernel_checks import check_kernels
from pdserve.executor.layouts import layout_of
from pdserve.executor.memory import available_bytes
from pdserve.executor.rank_memory import check_on_devices, num_copies, rank_page_bytes
from pdserve.executor.rank_sums import check_library
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.model.loading import needed_weights, shares
from pdserve.model.weights import Rank
from pdserve.protocol.kvlayout import KvLayout, coded_as
from pdserve.settings.config import Device, WorkerConfig, load_config
from pdserve.settings.degrees import Degrees
from pdserve.settings.processor import choose_dtype, read_cpu_info

STATE_BYTES = 4  # of a float32


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model that is served, in figures. Bytes, unless they say otherwise."""

    name: str
    path: str
    architecture: str
    num_parameters: int  # a tied head counts once
    file_bytes: int  # of the weights' files
    dtype: str
    because: str  # why it is that
    quantization: str
    weight_bytes: int  # in memory, nearly, of all ranks
    degrees: Degrees
    rank_weight_bytes: int  # of the rank that has the most
    max_model_len: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer with attention: tokens that a query sees; None: all
    state_bytes: int  # of a sequence, whatever its length
    kv_dtype: str  # of K and V in pages
    token_bytes: int  # of KV, as if there were no windows
    page_sizes: tuple[int, ...]  # tokens, of each group of layers but states
    page_bytes: int
    sequence_pages: int  # that a sequence of the greatest length needs at most, in steps of the workers' default
    device: str
    free_bytes: int
    has_chat_template: bool
    draft_method: str = ""  # what guesses; empty: nothing does
    draft_weight_bytes: int = 0  # in memory, nearly, beside the model's
    draft_page_bytes: int = 0  # of a draft model, for each page of the model's; KV of a head is in `page_bytes`
    rank_page_bytes: int = 0  # of the rank that has the most of a page, where ranks are on several devices or machines
    page_copies: int = 1  # of each page, in the memory of all ranks

    @property
    def num_alike(self) -> int:
        """Return on how many devices or machines like the one here the ranks are, as many on each."""
        return self.degrees.num_ranks if self.device == "cuda" else self.degrees.nodes

    @property
    def num_pages(self) -> int:
        """Return how many pages fit beside the weights, on all devices or machines like the one here."""
        if self.num_alike > 1:
            here = self.degrees.num_ranks // self.num_alike
            held_bytes = here * self.rank_weight_bytes + self.draft_weight_bytes  # as the first rank has it, at most
            return max(0, self.free_bytes - held_bytes) // (here * self.rank_page_bytes + self.draft_page_bytes)
        held_bytes = self.weight_bytes + self.draft_weight_bytes
        return max(0, self.free_bytes - held_bytes) // (self.page_copies * self.page_bytes + self.draft_page_bytes)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens have KV at once, as if there were no windows."""
        return int(self.num_pages / sum(1 / size for size in self.page_sizes))

    @property
    def num_sequences(self) -> int:
        """Return how many sequences of the greatest length have KV at once."""
        return self.num_pages // self.sequence_pages

    @property
    def sequence_bytes(self) -> int:
        """Return the KV of a sequence of the greatest length, at most."""
        return self.sequence_pages * self.page_bytes


def footprint_of(path: Path, **flags: object) -> Footprint:
    """Read a model's config, tokenizer, chat templates and the headers of its weights. flags: a worker's settings.

    Raises ConfigError for whatever workers and routers would refuse in them, naming the key or the tensor.
    """
    checkpoint = check_model(path)
    worker = _any_worker(path, flags)
    drafts = open_drafts(worker, checkpoint, "not read")
    checkpoint = in_parts(with_room(checkpoint, drafts), worker)
    config, device, degrees = checkpoint.config, worker.device, worker.degrees
    compiled = device not in KERNEL_DEVICES and not isinstance(library(), Missing)
    dtype, because = choose_dtype(worker.dtype, device, read_cpu_info(), compiled=compiled)
    quantization = choose_quantization(worker.quantization, checkpoint, dtype, device)
    drafts = among_ranks(drafts, worker, checkpoint, dtype, quantization)
    weights = needed_weights(config, weights_in_form(checkpoint, quantization, device))
    check_library(degrees)
    if worker.rank_memory == "own":
        check_on_devices(worker, config, weights)
    layout = layout_of(worker, config, dtype)
    if device in KERNEL_DEVICES:
        check_kernels(device, config, worker.page_size, DTYPES[dtype], coded_as(layout.dtype))
    is_apart = degrees.num_ranks > 1 and (device == "cuda" or degrees.nodes > 1)
    rank_shares = shares(config, degrees)
    file_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    held_bytes = weight_bytes(weights, dtype, device)
    draft_weight_bytes, draft_token_bytes = draft_bytes(drafts, quantization, dtype, device)
    return Footprint(
        name=checkpoint.name,
        path=str(checkpoint.path),
        architecture=config.architecture,
        num_parameters=sum(prod(stored.shape) for stored in weights.values()),
        file_bytes=file_bytes,
        dtype=dtype,
        because=because,
        quantization=quantization,
        weight_bytes=int(sum(rank_shares) * held_bytes),
        degrees=degrees,
        rank_weight_bytes=int(max(rank_shares) * held_bytes),
        max_model_len=config.max_position_embeddings,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=config.windows,
        state_bytes=STATE_BYTES * config.num_state_parts * sum(config.state_sizes),
        kv_dtype=layout.dtype,
        token_bytes=layout.token_bytes,
        page_sizes=layout.page_sizes,
        page_bytes=layout.page_bytes,
        sequence_pages=layout.paging.most_pages(config.max_position_embeddings, max(worker.step_tokens.values())),
        device="cpu" if device == "auto" else device,
        free_bytes=_free_bytes(device),
        has_chat_template=checkpoint.chat_template is not None,
        draft_method="" if worker.speculative_config is None else worker.speculative_config.method,
        draft_weight_bytes=draft_weight_bytes,
        draft_page_bytes=draft_token_bytes * layout.page_size,
        rank_page_bytes=_largest_page(layout, degrees) if is_apart else 0,
        page_copies=num_copies(layout, degrees),
    )


def _any_worker(path: Path, flags: Mapping[str, object]) -> WorkerConfig:
    """Return the settings of a worker with these flags; ConfigError where it would refuse them."""
    fixed = {"role": "mixed", "worker_id": "any", "routers": ("127.0.0.1:1",), "secret_file": path}
    return load_config(WorkerConfig, flags={"model": str(path), **fixed, **flags})


def _largest_page(layout: KvLayout, degrees: Degrees) -> int:
    """Return the bytes of a page of the rank that has the most of it."""
    return max([rank_page_bytes(layout, Rank.at(index, degrees)) for index in range(degrees.num_ranks)])


def _free_bytes(device: Device) -> int:
    """Return what is free on a device; 0 if it is not here."""
    if device != "cuda":
        return available_bytes()
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
