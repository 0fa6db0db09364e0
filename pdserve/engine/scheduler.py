"""What a worker computes next: continuous batching, chunked prefill, preemption by recompute. Pure.

Invariant: pages that a running step reads or writes are nobody else's until it is over. Sequences may be added,
stopped and removed while it runs: what it computes for one that has gone is dropped, and pages are given back after it.

Each step serves running sequences first (one token each), then prompts in chunks, under one token budget
(Sarathi-Serve, Agrawal et al. 2024). A prompt gets all its pages before its first chunk; when a running sequence
finds no page, the least urgent one gives up its pages and is computed anew later, with the same tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.kvcache import KvCache
from pdserve.engine.pages import Pages
from pdserve.engine.sequence import Finish, Sequence
from pdserve.engine.step import Chunk, SampledToken, StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.ids import PageId


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sequence gained a token. `position` counts the tokens generated before it, from the request's start."""

    sequence: Sequence
    index: int
    position: int
    token: SampledToken
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence was in a step for the first time."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk of a prompt is done: KV of tokens[:sequence.computed] is final."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Split:
    """A prompt's continuations go separate ways; those that ended with their first token are not among them."""

    sequence: Sequence
    children: tuple[Sequence, ...]


Outcome = Drawn | Started | Computed | Split


class Scheduler:
    """Sequences of one worker: waiting for pages, or running."""

    def __init__(self, cache: KvCache, limits: Limits) -> None:
        self.cache = cache
        self.limits = limits
        self.num_preemptions = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._planned: list[Sequence] = []  # parallel to the running step's chunks
        self._is_stepping = False
        self._dropped: list[Sequence] = []  # planned, and stopped since
        self._leaving: list[Pages] = []  # holds to give up when the step is over

    @property
    def num_running(self) -> int:
        """Return how many continuations are in the batch, those still sharing a prompt counted each."""
        return sum(len(s.indices) for s in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Return how many prompt tokens wait to be computed."""
        missing = (s.num_missing for s in (*self._waiting, *self._running))
        return sum(count for count in missing if count > 1)

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens' KV running sequences hold."""
        return sum(s.computed for s in self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose tokens are to be computed."""
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda s: s.urgency)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence run whose prompt is computed and whose pages are held for it."""
        self._running.append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Compute nothing more of a sequence; it keeps its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
            if self._is_stepping and sequence in self._planned:
                self._dropped.append(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give up its hold on its pages."""
        self.stop(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up a sequence's hold on its pages; they stay reusable until given out again."""
        if self._is_stepping:
            self._leaving.append(tuple(sequence.pages))
        else:
            self.cache.pool.release(tuple(sequence.pages))
        sequence.pages.clear()
        sequence.computed = 0
        sequence.num_published = 0

    def split(self, sequence: Sequence, first_tokens: Iterable[tuple[int, int]]) -> list[Sequence]:
        """Return a sequence for each (index, first token) that shares the prompt's pages, and release the prompt's.

        A shared page is copied before one of them writes into it.
        """
        children = []
        for index, token in first_tokens:
            self.cache.pool.share(sequence.pages)
            children.append(
                Sequence(
                    job=sequence.job,
                    indices=(index,),
                    tokens=[*sequence.tokens, token],
                    order=sequence.order,
                    computed=sequence.computed,
                    pages=list(sequence.pages),
                    names=list(sequence.names),
                    num_published=sequence.num_published,
                    num_cached_tokens=sequence.num_cached_tokens,
                    has_run=sequence.has_run,
                )
            )
        self.release(sequence)
        return children

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute."""
        if self._is_stepping:
            raise InvariantError("planned a step while one is running")
        budget = self.limits.max_num_batched_tokens
        chunks: list[Chunk] = []
        copies: list[tuple[PageId, PageId]] = []
        decoding = [s for s in self._running if s.num_missing == 1]
        for sequence in sorted(decoding, key=lambda s: s.urgency):
            if budget > 0 and sequence.pages and self._make_room(sequence, copies):
                budget -= 1
                self._schedule(sequence, 1, chunks)
        for sequence in sorted((s for s in self._running if s.num_missing > 1), key=lambda s: s.urgency):
            if budget > 0 and sequence.pages:
                count = min(budget, sequence.num_missing)
                budget -= count
                self._schedule(sequence, count, chunks)
        while budget > 0 and self._waiting:
            sequence = self._waiting[0]
            crowded = self._running and self.num_running + len(sequence.indices) > self.limits.max_num_seqs
            if crowded or not self._admit(sequence):
                break
            count = min(budget, sequence.num_missing)
            budget -= count
            self._schedule(sequence, count, chunks)
        if not chunks:
            return None
        self._is_stepping = True
        return StepPlan(tuple(chunks), tuple(copies))

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[Outcome, ...]:
        """Take in what a step brought. Sequences that ended, or go to a hand-off, are no longer running."""
        outcomes: list[Outcome] = []
        planned, dropped = self._end_step()
        for sequence, chunk, tokens in zip(planned, plan.chunks, result.tokens, strict=True):
            if sequence in dropped:
                continue
            was_prompt = sequence.num_missing > 1 or len(sequence.indices) > 1 or sequence.stop_after_prompt
            sequence.computed += len(chunk.token_ids)
            if not sequence.has_run:
                sequence.has_run = True
                outcomes.append(Started(sequence))
            self._publish(sequence)
            if was_prompt:
                outcomes.append(Computed(sequence))
            if tokens:
                outcomes += self._draw(sequence, tokens)
        return tuple(outcomes)

    def abandon(self) -> tuple[Sequence, ...]:
        """Forget the planned step, which failed; return its sequences, which stay where they were."""
        planned, dropped = self._end_step()
        return tuple(sequence for sequence in planned if sequence not in dropped)

    def _end_step(self) -> tuple[list[Sequence], list[Sequence]]:
        """Give back what left during the step; return its sequences, and those of them that were stopped."""
        planned, dropped, leaving = self._planned, self._dropped, self._leaving
        self._planned, self._dropped, self._leaving = [], [], []
        self._is_stepping = False
        for pages in leaving:
            self.cache.pool.release(pages)
        return planned, dropped

    def _schedule(self, sequence: Sequence, count: int, chunks: list[Chunk]) -> None:
        stop = sequence.computed + count
        chunks.append(
            Chunk(
                token_ids=sequence.tokens[sequence.computed : stop],
                start=sequence.computed,
                pages=sequence.pages[: self.cache.num_pages(stop)],
                samples=sequence.samples() if stop == len(sequence.tokens) else (),
            )
        )
        self._planned.append(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Move the first waiting sequence to the running ones, with pages for all it has to compute."""
        cache = self.cache
        if not sequence.names:
            sequence.names = cache.names(sequence.tokens, sequence.job.cache_salt)
        usable = (len(sequence.tokens) - 1) // cache.page_size  # at least one token is computed, to draw from
        reused = cache.reuse(sequence.names[:usable])
        fresh = cache.take(cache.num_pages(len(sequence.tokens)) - len(reused))
        if fresh is None:
            cache.pool.release(reused)
            return False
        sequence.pages = [*reused, *fresh]
        sequence.computed = len(reused) * cache.page_size
        sequence.num_published = len(reused)
        if not sequence.has_run:
            sequence.num_cached_tokens = sequence.computed
        self._waiting.pop(0)
        self._running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, copies: list[tuple[PageId, PageId]]) -> bool:
        """Give a decoding sequence a page of its own to write into, preempting others; False if it was preempted."""
        slot = sequence.computed // self.cache.page_size
        shared = slot < len(sequence.pages) and self.cache.pool.holders(sequence.pages[slot]) > 1
        if slot < len(sequence.pages) and not shared:
            return True
        while (pages := self.cache.take(1)) is None:
            victim = max((s for s in self._running if s.pages and s not in self._planned), key=lambda s: s.urgency)
            self._preempt(victim)
            if victim is sequence:
                return False
            if shared and self.cache.pool.holders(sequence.pages[slot]) == 1:
                return True  # the other holder was the victim
        if not shared:
            sequence.pages.append(pages[0])
            return True
        copies.append((sequence.pages[slot], pages[0]))
        self.cache.pool.release((sequence.pages[slot],))
        sequence.pages[slot] = pages[0]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._running.remove(sequence)
        self.release(sequence)
        self.add(sequence)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.cache.page_size
        if full > sequence.num_published:
            self.cache.extend_names(sequence.names, sequence.tokens, sequence.job.cache_salt)
            self.cache.publish(sequence.names, sequence.pages, sequence.num_published, full)
            sequence.num_published = full

    def _draw(self, sequence: Sequence, tokens: tuple[SampledToken, ...]) -> list[Outcome]:
        position = sequence.num_output_tokens
        outcomes: list[Outcome] = [
            Drawn(sequence, index, position, token, self._finish(sequence, token.token_id))
            for index, token in zip(sequence.indices, tokens, strict=True)
        ]
        going_on = [
            (index, token.token_id)
            for index, token in zip(sequence.indices, tokens, strict=True)
            if self._finish(sequence, token.token_id) is None
        ]
        if sequence.stop_after_prompt:
            self._running.remove(sequence)  # its pages are held until the hand-off is over
        elif len(sequence.indices) > 1:
            self._running.remove(sequence)
            children = self.split(sequence, going_on)
            self._running += children
            outcomes.append(Split(sequence, tuple(children)))
        elif going_on:
            sequence.tokens.append(tokens[0].token_id)
        else:
            self.remove(sequence)
        return outcomes

    def _finish(self, sequence: Sequence, token_id: int) -> Finish | None:
        params = sequence.job.params
        if token_id in params.stop_token_ids:
            return Finish.STOP
        if token_id in self.limits.eos_token_ids and not params.ignore_eos:
            return Finish.STOP
        full = len(sequence.tokens) + 1 >= self.limits.max_model_len
        if full or sequence.num_output_tokens + 1 >= params.max_tokens:
            return Finish.LENGTH
        return None
