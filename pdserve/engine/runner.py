"""Runs plans on a CPU: owns the KV pages and the model, and knows nothing of requests.

Page i of the pool is the contiguous run `kv[i]`; a step writes only the pages its plan names.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.attention_compiled import CompiledAttention
from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.batch import Batch, Ints
from pdserve.engine.decode_programs import DecodePrograms
from pdserve.engine.expert_balance import ExpertBalance
from pdserve.engine.features import Features
from pdserve.engine.layer_kinds import ByLayer, LayerKind, MakesStates, by_layer, pool_in, pool_shape, pool_size
from pdserve.engine.masks import NO_MASKS, TokenMasks, token_masks
from pdserve.engine.pooling import check_finite, pooled
from pdserve.engine.sampler import Sampler, score
from pdserve.engine.states import States
from pdserve.engine.states_compiled import CompiledStates
from pdserve.engine.step import SampleSpec, StepPlan, StepResult, Tokens
from pdserve.kernels.cpu.attention import serves, serves_chunks
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.calls import Immediate
from pdserve.kernels.cpu.layers import HeadTiles, Tiles
from pdserve.kernels.cpu.library import DTYPES, library
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.layer_groups import LayerGroup, held_by, layer_groups
from pdserve.model.parallel import own_part
from pdserve.model.sharding import part_of
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import PromptLogprobs, SampledToken


class EngineRunner(Protocol):
    """What computes an engine's steps, on whichever device. Call it from one thread at a time."""

    kv: Tensor  # [num_pages, layers, kv_parts, kv heads, page_size, width]; of several groups [num_pages, elements]

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step: copy pages, compute all chunks, sample. InvariantError if the plan cannot be run.

        What it raises ends this step, and no other.
        """
        ...


@runtime_checkable
class LaunchingRunner(EngineRunner, Protocol):
    """One that can launch a step while the device computes the one before it."""

    def start(self, plan: StepPlan) -> None:
        """Launch a step and return. It may need tokens of the step started just before it, and of no other."""
        ...

    def finish(self) -> StepResult:
        """Wait for the oldest step in flight; its pages are then written. May be called beside `start`."""
        ...


@dataclass(frozen=True, slots=True)
class RankPages:
    """Zeroed memory for the pages of one of several ranks."""

    memory: Tensor  # bytes
    are_own: bool = False  # they have its own layers and KV heads alone; else those of all ranks, which share them
    are_recorded: bool = True  # the sums of these ranks, in decode programs
    keep: Callable[[Ints | None], None] | None = None  # of the first rank: lets others keep their parts of states


def is_compiled(model: Model) -> bool:
    """Say whether the library computes all of a step.

    Of some attention torch computes a part, and with several ranks of norms over all heads.
    """
    config = model.config
    wide = model.rank.size > 1 and config.design.has_wide_norms
    of_torch = config.attends_in_torch or wide
    return not of_torch and all(isinstance(own_part(matrix), Tiles | HeadTiles) for matrix in model.matrices())


class Runner:
    """One model on the CPU."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        eos_token_ids: Seq[int] | None = None,
        pages: RankPages | None = None,
        code: KvCode | None = None,
    ) -> None:
        """Set up `num_pages` pages; those of the smallest group of layers have `page_size` tokens.

        eos_token_ids: the model config's unless given. pages: of one of several ranks.
        code: the form of K and V; the model's type unless given.
        """
        config = model.config
        self.groups = layer_groups(config, page_size)
        if pages is not None and pages.are_own:
            self.groups = held_by(model.rank, config, self.groups)
        rows = KvRows(config.head_dim, model.dtype, code)
        size, dtype = pool_size(config, num_pages, self.groups, rows.width), rows.pool_dtype
        self.kv = (
            zeroed(size, dtype, model.device)
            if pages is None
            else pool_in(pages.memory.view(dtype), size, by_head=pages.are_own)
        )
        self.model = model
        self._pool = pool_shape(config, num_pages, self.groups)
        self._attention, self._programs = _attention(model, self.kv, self.groups, rows)
        if pages is not None and not pages.are_recorded:
            self._programs = None
        self._keep_others = None if pages is None else pages.keep
        self._features = Features((), num_pages, self.groups[0].page_size)
        self._balance = ExpertBalance(model.expert_counts())
        self._eos_token_ids = config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._sampler = Sampler(self._eos_token_ids)
        self._mask_thread = ThreadPoolExecutor(1, "masks", _unbind)  # starts with the first mask

    def keep(self, features: Features) -> None:
        """From the first step on, keep features of each step's tokens."""
        self._features = features
        if not all(isinstance(matrix, Tiles | None) for _, matrix in features.parts):
            self._programs = None  # which multiply tiles alone

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        started_s = time.perf_counter()
        copy_pages(self.kv, plan.copies)
        tokens: tuple[tuple[Tokens, ...], ...] = ()
        prompts: dict[int, PromptLogprobs] = {}
        vectors: dict[int, bytes] = {}
        stuck: Mapping[int, str] = {}
        ratios: tuple[float, ...] = ()
        if plan.chunks:
            batch = Batch.of(plan, self._pool)
            masks = self._begin_masks(batch.samples)
            if batch.scored or batch.pooled:
                logits, prompts, vectors = self._beside(batch)
                check_finite(vectors)
            else:
                logits = self._logits(batch)
            found = masks.result() if masks is not None else NO_MASKS
            sampled = self._sampler.sample(logits, batch.samples, found)
            tokens = by_chunk(batch, sampled)
            if self._attention.states is not None:
                self._keep(batch.num_kept([token.token_id for token in sampled], found.stuck))
            stuck = batch.of_chunks(found.stuck)
            ratios = self._balance.after(batch.num_tokens)
        elapsed_s = time.perf_counter() - started_s
        return StepResult(tokens, elapsed_s, prompts=prompts, stuck=stuck, expert_ratios=ratios, pooled=vectors)

    @property
    def has_states(self) -> bool:
        """Say whether `commit` ends a step that this rank has followed."""
        return self._attention.states is not None

    def commit(self, num_kept: Ints | None) -> None:
        """Write the states behind so many tokens of each chunk of the step (all: None)."""
        assert self._attention.states is not None, "others keep none"
        self._attention.states.commit(num_kept)

    def _keep(self, num_kept: Ints | None) -> None:
        """Write states on all ranks, now that all of a step is computed and sampled."""
        if self._keep_others is not None:
            self._keep_others(num_kept)
        self.commit(num_kept)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Do this rank's part of a step of another rank, which samples."""
        copy_pages(self.kv, plan.copies)
        if not plan.chunks:
            return
        batch = Batch.of(plan, self._pool)
        if (batch.scored or batch.pooled) and self.model.rank.is_last:
            self._beside(batch)
        else:
            self._logits(batch)

    def _begin_masks(self, samples: Seq[SampleSpec]) -> Future[TokenMasks] | None:
        """Begin to compute masks in another thread, if a sample has a grammar."""
        if all(sample.matcher is None for sample in samples):
            return None
        return self._mask_thread.submit(token_masks, samples, self._pool.vocab_size, self._eos_token_ids)

    def _logits(self, batch: Batch) -> Tensor:
        """Compute a batch; returns the logits of its samples."""
        token_ids = self._planned(batch)
        every_token = np.array_equal(batch.sample_rows, np.arange(batch.num_tokens))
        is_decode = every_token and batch.num_tokens == len(batch.query_lens)
        if is_decode and self._programs is not None and not self._programs.lack_growth:
            logits, tap = self._programs.logits(batch.token_ids, self._features)
        else:
            rows, tap = None if every_token else torch.from_numpy(batch.sample_rows), self._features.tap()
            logits = self.model.forward(token_ids, self._attention, rows, tap)
        self._features.keep(batch, tap.features)
        return logits

    def _beside(self, batch: Batch) -> tuple[Tensor, dict[int, PromptLogprobs], dict[int, bytes]]:
        """Do as `_logits`; also score the prompts that want it, and make vectors of those that want that."""
        rows = None if batch.reads_all else torch.from_numpy(batch.last_rows)
        tap, prompts = self._features.tap(), dict[int, PromptLogprobs]()
        hidden = self.model.hidden(self._planned(batch), self._attention, rows, tap)
        self._features.keep(batch, tap.features)
        for each in batch.scored:
            targets = torch.tensor(each.targets.token_ids)
            prompts[each.place] = score(self.model, hidden[each.rows], targets, each.targets.num_top).packed()
        lasts = hidden if rows is not None else hidden.index_select(0, torch.from_numpy(batch.last_rows))
        sampled = lasts[: len(batch.sample_rows)]
        vectors = pooled(self.model, batch.pooled, hidden, lasts[len(sampled) :])
        return self.model.logits(sampled) if len(sampled) else sampled, prompts, vectors

    def _planned(self, batch: Batch) -> Tensor:
        """Prepare attention for a batch; return its token ids."""
        if batch.needs_previous:
            raise InvariantError("a step needs tokens of a running step, on a runner that computes one at a time")
        parts: Seq[TorchAttention | CompiledAttention] = self._attention.parts
        for part, group in zip(parts, self._attention.groups, strict=True):
            part.plan(batch.of_group(group))
        if self._attention.states is not None:
            self._attention.states.plan(batch.chains)
        return torch.from_numpy(batch.token_ids)


def _unbind() -> None:
    """Let this thread run on all of the process's cores: OpenMP has bound the thread that started it to one."""
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))  # the main thread's cores: it has the process's id


_Attentions = ByLayer[TorchAttention] | ByLayer[CompiledAttention]


def _attention(
    model: Model, kv: Tensor, groups: Seq[LayerGroup], rows: KvRows
) -> tuple[_Attentions, DecodePrograms | None]:
    """Return the attention that is fastest on this machine, and decode programs if they serve the whole model."""
    loaded, config = library(), part_of(model.config, model.rank)
    make, states = compiled_attention(config, rows), states_of(model)
    if isinstance(loaded, Missing) or make is None:
        return by_layer(partial(TorchAttention, config), model, kv, groups, rows, states), None
    attention = by_layer(make, model, kv, groups, rows, states)
    if not is_compiled(model):
        return attention, None
    return attention, DecodePrograms(model, attention, loaded)


def states_of(model: Model) -> MakesStates:
    """Return what makes states: of compiled kernels where they serve the model's type."""
    loaded = library()
    if isinstance(loaded, Missing) or model.dtype not in DTYPES:
        return States
    return partial(CompiledStates.of, Immediate(loaded))


def compiled_attention(config: ModelConfig, rows: KvRows) -> Callable[[LayerKind], CompiledAttention] | None:
    """Return what makes attention of compiled kernels; None where they do not serve such heads."""
    loaded, latent_heads = library(), config.num_heads if config.is_latent else None
    kinds = config.kinds_of_heads
    serves_rows = all(serves(each.head_dim, rows.dtype, latent_heads) for each in kinds)
    if isinstance(loaded, Missing) or config.attends_in_torch or not serves_rows:
        return None
    with_chunks = all(
        serves_chunks(loaded, each.head_dim, each.num_heads // each.num_kv_heads, rows.dtype, latent=config.is_latent)
        for each in kinds
    )
    return partial(CompiledAttention, Immediate(loaded), config, with_chunks=with_chunks)


def copy_pages(kv: Tensor, copies: Seq[tuple[PageId, PageId]]) -> None:
    """Copy whole pages; all are read before any is written. Does not wait for a GPU."""
    if not copies:
        return
    pages = torch.tensor(copies, dtype=torch.int64, pin_memory=kv.device.type == "cuda")
    if int(pages.min()) < 0 or int(pages.max()) >= len(kv):
        raise InvariantError(f"copies {copies} between {len(kv)} pages")
    sources, targets = pages.to(kv.device, non_blocking=True).unbind(1)
    kv.index_copy_(0, targets, kv.index_select(0, sources))


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On the CPU memory comes when it is first written to, or is asked for (`executor/memory.py`).

    NumPy asks for large pages, torch does not.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def by_chunk(batch: Batch, sampled: Seq[SampledToken]) -> tuple[tuple[Tokens, ...], ...]:
    """Give the samples, which are in batch order, back in the plan's order of chunks."""
    tokens: list[tuple[Tokens, ...]] = [()] * len(batch.order)
    first = 0
    for place, count in zip(batch.order.tolist(), batch.sample_counts.tolist(), strict=True):
        tokens[place] = tuple([(token,) for token in sampled[first : first + count]])
        first += count
    return tuple(tokens)
