"""Runs plans on a GPU: kernels for everything, and decode steps replayed instead of launched one by one.

A step of single tokens is a replay; any other is launched kernel by kernel. While the device computes a step's logits,
the host lays out how its tokens are drawn. Between `start` and `finish` the host is free to plan and start the step
after: steps run in the order they were started, on one stream, and tokens that one step draws for the next need not
come to the host in between. `run` waits, so between two of them the device does too.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention_triton import TritonAttention
from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.drawn import DrawnTokens
from pdserve.engine.graphs import Replays, StepInputs, graph_sizes, size_for
from pdserve.engine.runner import by_chunk, copy_pages, zeroed
from pdserve.engine.sampler import with_logprobs
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.step import Chunk, SampledToken, StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.ids import PageId
from pdserve.model.llama import Model

_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step a runner is set up for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Started:
    """A step on its way through the device."""

    batch: Batch | None  # None: copies alone
    token_ids: Tensor  # on the host, filled when the step is done
    logits: Tensor | None  # where log probabilities are asked for
    done: torch.cuda.Event | None
    started_s: float


class CudaRunner:
    """One model on one GPU, or on a CPU where Triton interprets. Call it from one thread at a time."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        limits: StepLimits,
        eos_token_ids: Seq[int] | None = None,
    ) -> None:
        """Set up `num_pages` pages of `page_size` tokens, zeroed. eos_token_ids: the model config's unless given.

        ValueError names what of the model or the pages the kernels do not serve.
        """
        config, device = model.config, model.embedding.device
        shape = (num_pages, config.num_layers, 2, config.num_kv_heads, page_size, config.head_dim)
        self.kv = zeroed(shape, model.embedding.dtype, device)
        self._model = model
        self._max_model_len = limits.max_model_len
        self._pool = PoolShape(num_pages, page_size, config.vocab_size)
        self._sizes = graph_sizes(limits.max_num_seqs)
        self._attention = TritonAttention(config, self.kv, model.rope, limits.max_model_len, self._sizes)
        self._inputs = StepInputs(max(limits.max_num_batched_tokens, self._sizes[-1]), page_size, num_pages, device)
        self._replays = Replays(device)
        self._sampler = KernelSampler(config.eos_token_ids if eos_token_ids is None else eos_token_ids, device)
        self._drawn: DrawnTokens | None = None  # by the step started last

    def run(self, plan: StepPlan) -> StepResult:
        """Copy pages, compute all chunks, draw their samples. InvariantError if the plan cannot be run."""
        return self.finish(self.start(plan))

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Started:
        """Launch a step and return at once. It may need tokens of the step started just before it, and of no other."""
        started_s = time.perf_counter()
        copy_pages(self.kv, plan.copies)
        batch = Batch.of(plan, self._pool) if plan.chunks else None
        token_ids, logits = self._compute(batch) if batch is not None else (_NOTHING, None)
        return Started(batch, token_ids, logits, self._mark(), started_s)

    @torch.inference_mode()
    def finish(self, step: Started) -> StepResult:
        """Wait for a step, the oldest not finished; its pages are then written."""
        if step.done is not None:
            step.done.synchronize()
        tokens: tuple[tuple[SampledToken, ...], ...] = ()
        if step.batch is not None:
            token_ids = step.token_ids.tolist()
            drawn = [SampledToken(token_id) for token_id in token_ids]
            if step.logits is not None:
                drawn = with_logprobs(step.logits, step.batch.samples, token_ids)
            tokens = by_chunk(step.batch, drawn)
        return StepResult(tokens, time.perf_counter() - step.started_s)

    def capture(self) -> None:
        """Capture every size of decode step now rather than when it first comes. Overwrites slots of page 0."""
        for size in reversed(self._sizes):
            chunks = tuple(Chunk((0,), 0, (PageId(0),), ()) for _ in range(size))
            self.run(StepPlan(chunks))

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Launch a batch; returns the place of its tokens on the host, and its logits if they are needed later."""
        logits = self._logits(batch)
        if not batch.samples:
            self._drawn = None
            return _NOTHING, None
        drawn = self._sampler.draw(logits, self._sampler.prepare(batch.samples))
        self._drawn = DrawnTokens(drawn, batch.first_samples)
        token_ids = torch.empty(len(batch.samples), dtype=torch.int64, pin_memory=drawn.device.type == "cuda")
        token_ids.copy_(drawn, non_blocking=True)
        reported = any(spec.params.logprobs is not None for spec in batch.samples)
        return token_ids, logits.clone() if reported else None  # the next step overwrites them

    def _logits(self, batch: Batch) -> Tensor:
        """Launch the model; returns the logits of the batch's samples, to be used before the next step."""
        longest = int(batch.kv_lens.max())
        if longest > self._max_model_len:
            raise InvariantError(f"a context of {longest} tokens, the limit is {self._max_model_len}")
        only_single = int(batch.query_lens[-1]) == 1
        size = size_for(batch.num_tokens, self._sizes) if only_single else None
        token_ids, positions, slots = self._inputs.send(batch, batch.num_tokens if size is None else size)
        if batch.follows_any:
            self._fill_in(token_ids, batch)
        self._attention.plan(batch, positions, slots)
        if size is None:
            return self._model.forward(token_ids, self._attention, self._rows(batch))
        logits = self._replays.run(size, lambda: self._model.forward(token_ids, self._attention, None))
        if np.array_equal(batch.sample_rows, np.arange(batch.num_tokens)):
            return logits[: batch.num_tokens]
        return logits.index_select(0, self._rows(batch))

    def _fill_in(self, token_ids: Tensor, batch: Batch) -> None:
        if self._drawn is None:
            raise InvariantError("a step follows one that drew nothing")
        self._drawn.fill_in(token_ids, batch.followed)

    def _rows(self, batch: Batch) -> Tensor:
        rows = torch.from_numpy(batch.sample_rows)
        if self.kv.device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(self.kv.device, non_blocking=True)

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event that comes when all that has been launched is done; None where nothing runs behind us."""
        if self.kv.device.type != "cuda":
            return None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.kv.device))
        return done
