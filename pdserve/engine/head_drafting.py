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

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.base.values import value
from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.batch import Batch, Ints, PoolShape
from pdserve.engine.drafting import Drafter, Line, guessed
from pdserve.engine.features import Features
from pdserve.engine.layer_kinds import A, ByLayer, LayerKind, pages_of
from pdserve.engine.masks import TokenMasks, token_masks
from pdserve.engine.runner import Runner, compiled_attention
from pdserve.engine.sampler import Sampler
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult
from pdserve.engine.verification import behind
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.guessing_head import Head
from pdserve.model.layer_groups import LayerGroup


@value
class Drawn:
    """What one pass has sampled, in the plan's order of chunks."""

    token_ids: Seq[int]
    stuck: Collection[int]  # places of chunks whose grammar lets nothing follow; their tokens mean nothing
    hidden: Tensor  # [num_chunks, hidden_size]: the outputs, which are the features of the next positions


class HeadPasses(Protocol):
    """What computes a head, on whichever device."""

    page_size: int  # tokens
    follows_steps: bool  # steps end with KV of the head for all that they have computed

    def features_of(self, slots: Ints) -> Tensor:
        """Return the features of tokens that the last step has computed, by their KV slots."""
        ...

    def run(self, plan: StepPlan, given: Tensor) -> Drawn | None:
        """Compute a pass. given: a feature for each token of the plan. None: nothing is sampled, else one of a chunk.

        The plan's tokens are those that follow the positions that are computed.
        """
        ...


class HeadRunner:
    """A head beside the model of a CPU's runner, over the pages of its pool."""

    follows_steps = False

    def __init__(self, head: Head, runner: Runner, eos_token_ids: Seq[int]) -> None:
        """runner: of a model whose config counts the head's layer, and before its first step."""
        (first, *_), config = runner.groups, head.config
        self._head, self.page_size = head, first.page_size
        self._pool = PoolShape(len(runner.kv), first.page_size, config.vocab_size)
        features = Features(head.taps, len(runner.kv), first.page_size)
        runner.keep(features)
        self.features_of = features.of
        rows = KvRows(config.head_dim, runner.kv.dtype)
        make = compiled_attention(config, rows) or partial(TorchAttention, config)
        self._attention = over_head(make(kind_of_head(head, runner.kv, first, rows)), first)
        self._eos_token_ids, self._sampler = eos_token_ids, Sampler(eos_token_ids)

    @torch.inference_mode()
    def run(self, plan: StepPlan, given: Tensor) -> Drawn | None:
        batch = Batch.of(plan, self._pool)
        self._attention.parts[0].plan(batch)
        features = given.index_select(0, torch.from_numpy(_places(batch, plan)))
        rows = torch.from_numpy(batch.sample_rows)
        hidden = self._head.hidden(torch.from_numpy(batch.token_ids), features, self._attention, rows)
        if not batch.samples:
            return None
        masks = token_masks(batch.samples, self._pool.vocab_size, self._eos_token_ids)
        sampled = self._sampler.sample(self._head.logits(hidden), batch.samples, masks)
        return drawn(batch, [token.token_id for token in sampled], masks, hidden)


def kind_of_head(head: Head, kv: Tensor, group: LayerGroup, rows: KvRows) -> LayerKind:
    """Return what a head's layer attends within: the pages of the model's first group of layers."""
    return LayerKind(
        0, head.scores, pages_of(kv, head.config, group, rows.width), (head.rope,) * group.num_layers, rows
    )


def over_head(attention: A, group: LayerGroup) -> ByLayer[A]:
    """Return an attention as the head's only layer, which lies behind the model's."""
    return ByLayer((attention,), (0,), ((0, len(group.layers)),))


def drawn(batch: Batch, token_ids: Seq[int], masks: TokenMasks, hidden: Tensor) -> Drawn:
    """Return what was sampled in batch order, once of each chunk, in the plan's order."""
    order = np.argsort(batch.order)
    rows = torch.from_numpy(order).to(hidden.device)
    return Drawn([token_ids[row] for row in order], batch.of_chunks(masks.stuck).keys(), hidden.index_select(0, rows))


class HeadDrafter(Drafter):
    """A head beside a runner's model."""

    def __init__(self, passes: HeadPasses) -> None:
        self._passes = passes

    def take_in(self, plan: StepPlan, result: StepResult) -> None:
        if self._passes.follows_steps:
            return
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

    def _lines(self, plan: StepPlan, result: StepResult) -> list[Line]:
        lines = []
        for place, (chunk, tokens) in enumerate(zip(plan.chunks, result.tokens, strict=True)):
            following = _following(chunk, [token.token_id for token in tokens[0]] if tokens else [])
            if place in result.stuck or not following:
                continue
            spec, num_guesses = None, 0
            if chunk.draft is not None:
                spec, num_guesses = guessed(behind(chunk.samples[0], following)), chunk.draft.num_guesses
            taken = len(following) - 1 if self._passes.follows_steps else 0  # the last one's output is a feature
            lines.append(Line(place, chunk.pages, following[taken:], chunk.start + taken, spec, num_guesses))
        return lines

    def _given(self, lines: Seq[Line]) -> Tensor:
        """Return the features of the model that lines take in."""
        slots, size = [], self._passes.page_size
        for line in lines:
            positions = np.arange(line.start, line.start + len(line.tokens))
            pages = np.asarray(line.pages, np.int64)[positions // size]
            slots.append(pages * size + positions % size)
        return self._passes.features_of(np.concatenate(slots))

    def _pass(self, lines: Seq[Line], given: Tensor) -> tuple[list[Line], Tensor]:
        """Let the head compute once, from features in the order of lines.

        Return the lines that want another guess, and for each of them the output that is its next feature.
        """
        chunks = (Chunk(line.tokens, line.start, line.pages, line.samples(), Phase.DECODE) for line in lines)
        found = self._passes.run(StepPlan(tuple(chunks)), given)
        if found is None:
            return [], given
        going_on = [n for n, line in enumerate(lines) if n not in found.stuck and line.take(found.token_ids[n])]
        return [lines[n] for n in going_on], found.hidden[going_on]


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
