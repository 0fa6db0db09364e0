"""Runs plans on a GPU: kernels for everything, and decode steps captured in CUDA graphs.

A step of single tokens is captured in a few fixed sizes and replayed: n of them run in the smallest size that holds n.
What changes between two steps of a size lies at addresses that never change. Padding is a token whose K and V go
nowhere and whose result nobody reads. Any other step is launched kernel by kernel.

While the device computes a step's logits, the host lays out how its tokens are sampled. Scheduling may be asynchronous:
between `start` and `finish` the host may plan and start the next step. Steps run in the order they were started, on one
stream, and a token that one step samples for the next need not come to the host in between. Where a sample depends on
that token by a grammar or bad words, the host waits for it once the next step's logits are launched.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.attention_triton import PromptAttention, TritonAttention, graph_sizes, size_for
from pdserve.engine.batch import KNOWN, Batch, Ints
from pdserve.engine.device_pages import PLAIN, DevicePages
from pdserve.engine.gpu_memory import most_samples
from pdserve.engine.layer_kinds import by_layer, pool_shape
from pdserve.engine.masks import token_masks
from pdserve.engine.replays import Replays
from pdserve.engine.runner import by_chunk, copy_pages
from pdserve.engine.sampler import Scores, reported_rows, sampled_tokens, score, score_samples
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.scheduler import Limits
from pdserve.engine.states_triton import TritonStates
from pdserve.engine.step import Chunk, SampleSpec, StepPlan, StepResult, Tokens
from pdserve.engine.step_inputs import step_inputs
from pdserve.engine.steps_in_flight import InFlight, SampledOnDevice
from pdserve.engine.warm_up_steps import prompt_steps
from pdserve.kernels.staging import Staging, aligned
from pdserve.model.family import Model
from pdserve.model.sharding import part_of
from pdserve.model.taps import Tap, Taps
from pdserve.protocol.sampling import SamplingParams

_NOTHING = torch.empty(0, dtype=torch.int64)

_NUM_INPUTS = 2  # token ids and positions, beside the slots of each group of layers


@dataclass(frozen=True, slots=True)
class Left:
    """What the forward pass of a step leaves for a head, on the device."""

    size: int | None  # that was replayed, which the next step of that size overwrites; None: nothing was
    features: Tensor | None  # [num_tokens or size, hidden_size] in batch order


TakesIn = Callable[[StepPlan, Batch, Left, Tensor | None], object]  # the tensor: sampled tokens
_OnHost = tuple[Tensor, Scores | None, Mapping[int, Scores], Mapping[int, str]]  # see `InFlight`


class CudaRunner:
    """One model, or a rank's part of it, on one GPU, or on a CPU where Triton interprets."""

    max_in_flight = 2  # steps that are started and not finished; they end in the order in which they were started

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        limits: Limits,
        prompts: PromptAttention | None = None,
        pages: DevicePages = PLAIN,
    ) -> None:
        """Set up `num_pages` zeroed pages; those of the smallest group of layers have `page_size` tokens.

        limits: of the steps to come. prompts: what attends to prompts in place of the kernels, where layers are alike.
        pages: how they are kept. If there are several ranks, each starts all steps; the first one samples.

        ValueError says what the kernels do not serve of the model or the pages.
        """
        config, device = model.config, model.device
        self.groups, self.kv, rows = pages.pool_of(model, num_pages, page_size)
        self.rank, self.spread, self._keep_others = model.rank, pages.spread, pages.keep
        self._model = model
        self._max_model_len = limits.max_model_len
        self._pool = pool_shape(config, num_pages, self.groups)
        self._sizes = graph_sizes(most_samples(limits))
        self._max_tokens = max(limits.max_num_batched_tokens, self._sizes[-1])
        make = partial(TritonAttention, part_of(config, model.rank), limits.max_model_len, self._sizes, prompts)
        make_states = partial(TritonStates, config, (self._max_tokens, self._sizes[-1]))
        self._attention = by_layer(make, model, self.kv, self.groups, rows, make_states)
        self._inputs = Staging(device, (_NUM_INPUTS + len(self.groups)) * aligned(self._max_tokens))
        self._staging = Staging(device)
        self._replays = Replays[tuple[Tensor, Tensor | None]](device)
        self._taps: Taps = ()
        self._take_in: TakesIn | None = None
        self._eos_token_ids = sorted(limits.eos_token_ids)
        self._sampler: KernelSampler | None = None
        if model.rank.index == 0:
            self._sampler = KernelSampler(self._eos_token_ids, config.vocab_size, self._sizes[-1], device)
        self._sampled: SampledOnDevice | None = None  # by the step started last
        self._in_flight: deque[InFlight] = deque()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step while no other is in flight."""
        self.start(plan)
        return self.finish()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> None:
        """Launch a step and return at once. It may need tokens of the step started just before it, and of no other."""
        if len(self._in_flight) >= self.max_in_flight:
            raise InvariantError(f"started a step while {len(self._in_flight)} are in flight")
        started_s = time.perf_counter()
        copy_pages(self.kv, plan.copies)
        batch = Batch.of(plan, self._pool) if plan.chunks else None
        made = self._compute(plan, batch) if batch is not None else (_NOTHING, None, {}, {})
        if batch is not None and self._attention.states is not None and not batch.has_guesses:
            self._attention.states.commit()  # last: a step that is not launched whole writes no state
        self._in_flight.append(InFlight(batch, *made, self._mark(), started_s))

    @torch.inference_mode()
    def finish(self) -> StepResult:
        """Wait for the oldest step in flight; its pages are then written."""
        if not self._in_flight:
            raise InvariantError("no step was started")
        step = self._in_flight.popleft()
        if step.done is not None:
            step.done.synchronize()
        tokens: tuple[tuple[Tokens, ...], ...] = ()
        stuck: Mapping[int, str] = {}
        if step.batch is not None:
            token_ids = step.token_ids.tolist()
            sampled = sampled_tokens(token_ids, step.batch.samples, step.logprobs)
            tokens, stuck = by_chunk(step.batch, sampled), step.batch.of_chunks(step.stuck)
            self._keep_states(step.batch, token_ids, step.stuck)
        prompts = {place: scores.packed() for place, scores in step.scores.items()}
        return StepResult(tokens, time.perf_counter() - step.started_s, prompts=prompts, stuck=stuck)

    def _keep_states(self, batch: Batch, sampled: Seq[int], stuck: Collection[int]) -> None:
        """Write the states behind guesses that were right, on all ranks: the host had to see what is sampled."""
        if self._sampler is None or self._attention.states is None or not batch.has_guesses:
            return
        num_kept = batch.num_kept(sampled, stuck)
        if self._keep_others is not None:
            self._keep_others(num_kept)
        self.commit(num_kept)

    @property
    def has_states(self) -> bool:
        """Say whether `commit` ends a step with guesses that another rank samples."""
        return self._attention.states is not None

    @torch.inference_mode()
    def commit(self, num_kept: Ints | None) -> None:
        """Write the states behind so many tokens of each chunk of the step that was started last (all: None)."""
        assert self._attention.states is not None, "others keep none"
        self._attention.states.commit(num_kept)
        if (written := self._mark()) is not None:
            written.synchronize()

    def capture(self, run: Callable[[StepPlan], StepResult] | None = None) -> None:
        """Compile kernels and capture decode steps now, not when they are first needed. Overwrites slots of page 0.

        run: computes these steps on all ranks.
        """
        run = run or self.run
        penalized = SamplingParams(repetition_penalty=2.0)  # to compile the counting of tokens as well
        spec = SampleSpec(penalized, 0, 0, (0,), (), forbid_stops=False, sequence=(-1, 0))
        nothing = tuple((PageId(0),) for _ in self.groups[1:])
        chunk = Chunk((0, 0), 0, (PageId(0),), (spec,), other_pages=nothing)
        run(StepPlan((chunk,)))  # two tokens are a prompt to attention
        if self.kv.device.type == "cuda":  # Triton's interpreter has nothing to compile
            most = min(self._max_tokens, self._sizes[-1] * self._max_model_len)  # of one sequence each
            for plan in prompt_steps(most, self._max_model_len, self._pool):
                run(plan)
        for size in reversed(self._sizes):
            chunks = tuple(Chunk((0,), 0, (PageId(0),), (), other_pages=nothing) for _ in range(size))
            run(StepPlan(chunks))

    def keep(self, taps: Taps, take_in: TakesIn) -> None:
        """From the first step on, let a head take in each step's tokens behind it, from features of these layers."""
        self._taps, self._take_in = taps, take_in

    def _compute(self, plan: StepPlan, batch: Batch) -> _OnHost:
        """Launch a batch, and what a head takes in of it; return what comes to the host."""
        logits, left, scores = self._scored(batch) if batch.scored else self._logits(batch)
        try:
            token_ids, logprobs, stuck = self._sample(logits, batch)
        except Exception:
            if self.spread is not None:  # other ranks wait for what is sampled; all compute the step again
                unknown = torch.zeros(len(batch.samples), dtype=torch.int64, device=self.kv.device)
                self._let_take_in(plan, batch, left, unknown)
            raise
        self._let_take_in(plan, batch, left, None if self._sampled is None else self._sampled.token_ids)
        return token_ids, logprobs, scores, stuck

    def _let_take_in(self, plan: StepPlan, batch: Batch, left: Left, sampled: Tensor | None) -> None:
        """Let a head, if there is one, take in a step. sampled: in batch order; on ranks that do not sample, room."""
        if self._take_in is None:
            return
        if self.spread is not None and sampled is not None:
            self.spread(sampled)
        self._take_in(plan, batch, left, sampled)

    def _sample(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Scores | None, Mapping[int, str]]:
        """Launch sampling; return where tokens and their scores come on the host, and stuck samples."""
        if not batch.samples:
            self._sampled = None
            return _NOTHING, None, {}
        if self._sampler is None:
            awaited = torch.empty(len(batch.samples), dtype=torch.int64, device=self.kv.device)
            self._sampled = SampledOnDevice(awaited, batch.first_samples, _NOTHING, None)
            return _NOTHING, None, {}
        samples = self._completed(batch)  # while the device computes, and masks, too
        masks = token_masks(samples, self._pool.vocab_size, self._eos_token_ids)
        sampled = self._sampler.sample(logits, samples, masks)
        token_ids = torch.empty(len(samples), dtype=torch.int64, pin_memory=sampled.device.type == "cuda")
        token_ids.copy_(sampled, non_blocking=True)
        self._sampled = SampledOnDevice(sampled, batch.first_samples, token_ids, self._mark())
        return token_ids, self._logprobs(logits, batch, sampled), masks.stuck

    def _completed(self, batch: Batch) -> Seq[SampleSpec]:
        """Return the batch's samples with all that the host has to know of them.

        Waits for the tokens of the step before where a sample depends on them, while the device computes this one.
        """
        lacking = np.flatnonzero([spec.needs_output for spec in batch.samples])
        if not len(lacking):
            return batch.samples
        before, samples = self._before(), list(batch.samples)
        sources, tokens = before.of_chunks(batch.previous[batch.sample_rows[lacking]]), before.wait()
        for sample, source in zip(lacking.tolist(), sources.tolist(), strict=True):
            samples[sample] = samples[sample].after(tokens[source])
        return samples

    def _before(self) -> SampledOnDevice:
        if self._sampled is None:
            raise InvariantError("a step needs tokens of one that sampled nothing")
        return self._sampled

    def _logprobs(self, logits: Tensor, batch: Batch, token_ids: Tensor) -> Scores | None:
        """Score sampled tokens whose log probabilities are asked for, before the next step overwrites the logits."""
        rows = reported_rows(batch.samples)
        if not len(rows):
            return None
        return score_samples(logits, batch.samples, self._staging.send(rows)[0], token_ids).to_host()

    def _logits(self, batch: Batch) -> tuple[Tensor, Left, Mapping[int, Scores]]:
        """Launch the model; returns the logits of the batch's samples, to be used before the next step."""
        only_single = int(batch.query_lens[-1]) == 1
        size = size_for(batch.num_tokens, self._sizes) if only_single else None
        token_ids = self._planned(batch, batch.num_tokens if size is None else size)
        if size is None:
            logits, features = self._forward(token_ids, self._rows(batch))
            return logits, Left(None, features), {}
        logits, features = self._replays.run(size, lambda: self._forward(token_ids, None))
        if np.array_equal(batch.sample_rows, np.arange(batch.num_tokens)):
            return logits[: batch.num_tokens], Left(size, features), {}
        return logits.index_select(0, self._rows(batch)), Left(size, features), {}

    def _forward(self, token_ids: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        tap = Tap(self._taps)
        return self._model.forward(token_ids, self._attention, rows, tap), tap.features

    def _scored(self, batch: Batch) -> tuple[Tensor, Left, Mapping[int, Scores]]:
        """Do as `_logits`, and score the prompts that want it."""
        tap = Tap(self._taps)
        hidden = self._model.hidden(self._planned(batch, batch.num_tokens), self._attention, None, tap)
        scores = {}
        for each in batch.scored:
            (targets,) = self._staging.send(np.array(each.targets.token_ids))
            scores[each.place] = score(self._model, hidden[each.rows], targets.long(), each.targets.num_top).to_host()
        sampled = hidden.index_select(0, self._rows(batch))
        return self._model.logits(sampled) if len(sampled) else sampled, Left(None, tap.features), scores

    def _planned(self, batch: Batch, size: int) -> Tensor:
        """Prepare a step for the model, with room for `size` tokens; returns their ids."""
        longest = int(batch.kv_lens.max())
        if longest > self._max_model_len:
            raise InvariantError(f"a context of {longest} tokens, the limit is {self._max_model_len}")
        token_ids, positions, *slots = self._send(batch, size)
        if batch.needs_previous:
            self._fill_in(token_ids, batch)
        for part, group in zip(self._attention.parts, self._attention.groups, strict=True):
            part.plan(batch.of_group(group), positions, slots[group])
        if self._attention.states is not None:
            if any(step.batch is not None and step.batch.has_guesses for step in self._in_flight):
                raise InvariantError("started a step while guesses are verified, whose states are not known")
            self._attention.states.plan(batch.chains)
        return token_ids

    def _send(self, batch: Batch, size: int) -> list[Tensor]:
        """Send token ids, positions and each group's slots, int32 [size].

        Steps of one size find them at the same addresses.
        """
        if size > self._max_tokens:
            raise InvariantError(f"a step of {size} tokens, the limit is {self._max_tokens}")
        return self._inputs.send(*step_inputs(batch, self._pool, size))

    def _fill_in(self, token_ids: Tensor, batch: Batch) -> None:
        """Write tokens of the previous step into this one's, behind the work already launched."""
        before, places = self._before(), np.flatnonzero(batch.previous != KNOWN)
        if self.spread is not None and self._take_in is None:  # else all ranks have had them for the head
            self.spread(before.token_ids)
        targets, sources = self._staging.send(places, before.of_chunks(batch.previous[places]))
        token_ids.index_copy_(0, targets.long(), before.token_ids.index_select(0, sources).to(token_ids.dtype))

    def _rows(self, batch: Batch) -> Tensor:
        return self._staging.send(batch.sample_rows)[0]

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event after all that has been launched; None on a CPU, which has computed it already."""
        if self.kv.device.type != "cuda":
            return None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.kv.device))
        return done
