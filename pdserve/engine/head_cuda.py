"""A head on a GPU: takes in each step behind it, and guesses in passes of single tokens that CUDA graphs replay.

Invariant: taking in waits for nothing. What follows the last token of a chunk is what the step samples, and that is
read where the sampler has left it; features never leave the device. So steps are launched ahead with a head, too.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.engine.attention_triton import TritonAttention, graph_sizes, size_for
from pdserve.engine.batch import Batch, Ints, PoolShape
from pdserve.engine.features import Features
from pdserve.engine.gpu_memory import most_samples
from pdserve.engine.head_drafting import Drawn, drawn, kind_of_head, over_head
from pdserve.engine.masks import token_masks
from pdserve.engine.replays import Replays
from pdserve.engine.runner_cuda import CudaRunner, Left
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan
from pdserve.engine.step_inputs import step_inputs
from pdserve.kernels.kv_rows import KvRows
from pdserve.kernels.staging import Staging, aligned
from pdserve.model.guessing_head import Head
from pdserve.model.sharding import part_of
from pdserve.protocol.sampling import SamplingParams

_NUM_INPUTS = 3  # token ids, positions and slots


class CudaHead:
    """A head beside the model of a GPU's runner, over the pages of its pool: see `head_drafting.HeadPasses`."""

    follows_steps = True

    def __init__(self, head: Head, runner: CudaRunner, limits: Limits) -> None:
        """runner: of a model whose config counts the head's layer. ValueError says what the kernels do not serve."""
        first, config, device = runner.groups[0], head.config, runner.kv.device
        self._head, self.page_size = head, first.page_size
        self._pool = PoolShape(len(runner.kv), first.page_size, config.vocab_size)
        self._features = Features(head.taps, len(runner.kv), first.page_size)
        self.features_of = self._features.of
        self._most_seqs, self._sizes = limits.max_num_seqs, graph_sizes(most_samples(limits))
        kind = kind_of_head(head, runner.kv, first, KvRows(config.head_dim, runner.kv.dtype))
        own = part_of(config, runner.rank)
        self._attention = over_head(TritonAttention(own, limits.max_model_len, self._sizes, None, kind), first)
        max_tokens = max(limits.max_num_batched_tokens, self._sizes[-1])
        self._inputs, self._staging = Staging(device, _NUM_INPUTS * aligned(max_tokens)), Staging(device)
        self._taking, self._guessing = Replays[Tensor](device), Replays[tuple[Tensor, Tensor]](device)
        self._rows = torch.arange(self._sizes[-1], device=device)
        self._given = torch.zeros((self._sizes[-1], config.hidden_size), dtype=runner.kv.dtype, device=device)
        self._eos_token_ids, self._spread = sorted(limits.eos_token_ids), runner.spread
        self._sampler: KernelSampler | None = None
        if runner.rank.index == 0:
            self._sampler = KernelSampler(self._eos_token_ids, config.vocab_size, limits.max_num_seqs, device)

    def follow(self, runner: CudaRunner, attempt: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Take in the runner's steps from the first one on.

        attempt: keeps what fails here from ending them; None: it ends them, since other ranks wait in a sum.
        """
        taken = self.take_in if attempt is None else lambda *step: attempt(lambda: self.take_in(*step))
        runner.keep(self._head.taps, taken)

    @torch.inference_mode()
    def take_in(self, plan: StepPlan, batch: Batch, left: Left, sampled: Tensor | None) -> None:
        """Launch K and V of all that a step computes, behind the step. sampled: its tokens, in batch order."""
        features = left.features
        assert features is not None, "the runner keeps them"
        self._features.keep(batch, features)
        known, rows, sources = _following(plan, batch)
        token_ids = self._planned(replace(batch, token_ids=known), left.size or batch.num_tokens)
        if len(rows):
            assert sampled is not None, "rows follow samples"
            targets, places = self._staging.send(rows, sources)
            token_ids.index_copy_(0, targets.long(), sampled.index_select(0, places).to(token_ids.dtype))

        def compute() -> Tensor:
            return self._head.hidden(token_ids, features, self._attention, self._rows[:0])

        if left.size is None:
            compute()
        else:
            self._taking.run(left.size, compute)

    @torch.inference_mode()
    def run(self, plan: StepPlan, given: Tensor | None) -> Drawn | None:
        """Compute a pass of single tokens, each of which is sampled behind.

        Ranks that do not sample are given nothing, and return nothing: they get the first one's features.
        """
        batch = Batch.of(plan, self._pool)
        num_rows = batch.num_tokens
        size = size_for(num_rows, self._sizes)
        assert size is not None, "a step has no more sequences"
        token_ids = self._planned(batch, size)
        if given is not None:
            self._given[:num_rows] = given.index_select(0, self._staging.send(batch.order)[0])
        if self._spread is not None:
            self._spread(self._given[:size])

        def compute() -> tuple[Tensor, Tensor]:
            hidden = self._head.hidden(token_ids, self._given[:size], self._attention, self._rows[:size])
            return hidden, self._head.logits(hidden)

        hidden, logits = self._guessing.run(size, compute)
        if self._sampler is None:
            return None
        masks = token_masks(batch.samples, self._pool.vocab_size, self._eos_token_ids)
        sampled = self._sampler.sample(logits[:num_rows], batch.samples, masks)
        return drawn(batch, sampled.cpu().tolist(), masks, hidden)

    def capture(self, run: Callable[[StepPlan, Tensor], object] | None = None) -> None:
        """Capture guesses of up to all sequences now, not when they are first needed. Overwrites slots of page 0.

        run: computes these passes on all ranks.
        """
        run = run or self.run
        spec = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), forbid_stops=False, sequence=(-1, 0))
        chunk = Chunk((0,), 0, (PageId(0),), (spec,), Phase.DECODE)
        for size in reversed(self._sizes[: 1 + bisect_left(self._sizes, self._most_seqs)]):
            run(StepPlan((chunk,) * size), self._given[:size])

    def _planned(self, batch: Batch, size: int) -> Tensor:
        """Prepare attention, with room for `size` tokens; returns their ids."""
        token_ids, positions, slots = self._inputs.send(*step_inputs(batch, self._pool, size))
        self._attention.parts[0].plan(batch, positions, slots)
        return token_ids


def _following(plan: StepPlan, batch: Batch) -> tuple[Ints, Ints, Ints]:
    """Return the token that follows each of a batch's, then the rows whose one is sampled, and by which samples.

    Where nobody knows what follows, as behind a prompt of which a vector is made, it is a zero.
    """
    known, lasts = np.append(batch.token_ids[1:], 0), batch.query_starts[1:] - 1
    of_chunks = [plan.chunks[place].following for place in batch.order]
    known[lasts] = [0 if token is None else token for token in of_chunks]
    is_sampled = (batch.sample_counts > 0) & np.array([token is None for token in of_chunks])
    firsts: Ints = np.cumsum(batch.sample_counts) - batch.sample_counts
    return known, lasts[is_sampled], firsts[is_sampled]
