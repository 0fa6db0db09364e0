"""A head guesses from what the worker's model computes: an EAGLE-3 head, or the model's own module (MTP).

Invariant: once a step has ended, the pages hold KV of the head for each token that they hold KV of the model for. So
KV of the head lies in the same pages, behind the model's layers: it is handed off, shared, copied and given up with
them, and is final when they are.

The head takes in a token's feature together with the token that follows. A step has both: what follows the last token
that it computes is what it samples. Where sequences go on differently behind shared pages, the head has taken in what
followed in the first of them: for one token, guesses of the others may be worse. One exception:
prompts of which vectors are made sample nothing, so the head does not take in their last token. The KV of guesses lies
behind what the sequence has computed, where the next step writes.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.batch import Batch, Ints, PoolShape
from pdserve.engine.drafting import Drafter, unscored
from pdserve.engine.features import Features
from pdserve.engine.layer_kinds import ByLayer, LayerKind, pages_of
from pdserve.engine.masks import token_masks
from pdserve.engine.runner import Runner, by_chunk, compiled_attention
from pdserve.engine.sampler import Sampler
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, StepResult
from pdserve.engine.verification import behind
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.guessing_head import Head


@dataclass(slots=True)
class _Line:
    """What the head takes in of one chunk, and what it guesses behind that."""

    place: int  # of the chunk in the plan
    pages: Seq[PageId]
    following: Seq[int]  # the tokens that follow those at positions start, start + 1, …
    start: int
    spec: SampleSpec | None  # what to sample behind them; None: nothing
    num_guesses: int
    guesses: list[int] = field(default_factory=list)

    def chunk(self) -> Chunk:
        samples = () if self.spec is None else (behind(self.spec, self.guesses),)
        return Chunk(self.following, self.start, self.pages, samples, Phase.DECODE)

    def take(self, guess: int) -> bool:
        """Take in a guess; return whether another one is wanted."""
        self.guesses.append(guess)
        self.start, self.following = self.start + len(self.following), (guess,)
        return len(self.guesses) < self.num_guesses


class HeadDrafter(Drafter):
    """A head beside the model of a runner, over the pages of its pool."""

    def __init__(self, head: Head, runner: Runner, eos_token_ids: Seq[int]) -> None:
        """runner: of a model whose config counts the head's layer, and before its first step."""
        (first, *_), config = runner.groups, head.config
        self._head, self._page_size = head, first.page_size
        self._pool = PoolShape(len(runner.kv), first.page_size, config.vocab_size)
        self._features = Features(head.taps, len(runner.kv), first.page_size)
        runner.keep(self._features)
        rows, ropes = KvRows(config.head_dim, runner.kv.dtype), (head.rope,) * first.num_layers
        kind = LayerKind(0, head.scores, pages_of(runner.kv, config, first, rows.width), ropes, rows)
        make = compiled_attention(config, rows) or partial(TorchAttention, config)
        self._attention = ByLayer((make(kind),), (0,), ((0, len(first.layers)),))
        self._eos_token_ids, self._sampler = eos_token_ids, Sampler(eos_token_ids)

    def take_in(self, plan: StepPlan, result: StepResult) -> None:
        lines = [line for line in self._lines(plan, result) if line.spec is None]
        if lines:
            self._pass(lines, self._given(lines))

    def draft(self, plan: StepPlan, result: StepResult) -> Mapping[int, tuple[int, ...]]:
        lines = [line for line in self._lines(plan, result) if line.spec is not None]
        open_lines = lines
        given = self._given(lines) if lines else torch.empty(0)
        while open_lines:
            open_lines, given = self._pass(open_lines, given)
        return {line.place: tuple(line.guesses) for line in lines}

    def _lines(self, plan: StepPlan, result: StepResult) -> list[_Line]:
        lines = []
        for place, (chunk, tokens) in enumerate(zip(plan.chunks, result.tokens, strict=True)):
            following = _following(chunk, [token.token_id for token in tokens[0]] if tokens else [])
            if place in result.stuck or not following:
                continue
            spec, num_guesses = None, 0
            if chunk.draft is not None:
                spec, num_guesses = unscored(behind(chunk.samples[0], following)), chunk.draft.num_guesses
            lines.append(_Line(place, chunk.pages, following, chunk.start, spec, num_guesses))
        return lines

    def _given(self, lines: Seq[_Line]) -> Tensor:
        """Return the features of the model that lines take in."""
        slots = []
        for line in lines:
            positions = np.arange(line.start, line.start + len(line.following))
            pages = np.asarray(line.pages, np.int64)[positions // self._page_size]
            slots.append(pages * self._page_size + positions % self._page_size)
        return self._features.of(np.concatenate(slots))

    @torch.inference_mode()
    def _pass(self, lines: Seq[_Line], given: Tensor) -> tuple[list[_Line], Tensor]:
        """Let the head compute once, from features in the order of lines.

        Return the lines that want another guess, and for each of them the output that is its next feature.
        """
        plan = StepPlan(tuple([line.chunk() for line in lines]))
        batch = Batch.of(plan, self._pool)
        self._attention.parts[0].plan(batch)
        features = given.index_select(0, torch.from_numpy(_places(batch, plan)))
        rows = torch.from_numpy(batch.sample_rows)
        hidden = self._head.hidden(torch.from_numpy(batch.token_ids), features, self._attention, rows)
        if not batch.samples:
            return [], hidden
        masks = token_masks(batch.samples, self._pool.vocab_size, self._eos_token_ids)
        sampled = self._sampler.sample(self._head.logits(hidden), batch.samples, masks)
        tokens, stuck = by_chunk(batch, sampled), batch.of_chunks(masks.stuck)
        going_on = [n for n, line in enumerate(lines) if n not in stuck and line.take(tokens[n][0][0].token_id)]
        rows_of = np.argsort(batch.order)[going_on]  # each line has one sample
        return [lines[n] for n in going_on], hidden.index_select(0, torch.from_numpy(rows_of))


def _following(chunk: Chunk, sampled: list[int]) -> list[int]:
    """Return the tokens that follow those of a chunk that are the sequence's, as far as they are known."""
    if chunk.phase is Phase.DECODE:
        return sampled
    known = [] if chunk.following is None else [chunk.following]
    return [*chunk.token_ids[1:], *known, *sampled]


def _places(batch: Batch, plan: StepPlan) -> Ints:
    """Return which of the plan's tokens each of the batch's is."""
    firsts = np.cumsum([0, *[len(chunk.token_ids) for chunk in plan.chunks]])[:-1]
    return np.arange(batch.num_tokens) + np.repeat(firsts[batch.order] - batch.query_starts[:-1], batch.query_lens)
