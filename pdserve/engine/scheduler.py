"""What a worker computes next: continuous batching, chunked prefill, preemption by recompute. Pure.

Invariant: pages that a running step reads or writes are nobody else's until the step is over. Sequences may be added,
held, stopped and removed while a step runs. What it computes for a sequence that has gone is dropped, and the pages of
that sequence are released after the step.

Scheduling may be asynchronous: the next step is planned while one runs. A token that is not sampled yet is named by the
chunk that it is sampled for. For a sequence that turns out to have ended, one token too many is computed. Where a
sequence has guesses, no step is planned ahead: until its result is there, nobody knows how many tokens it gains. To
plan for the others alone would part the batch in two.

Each step serves sequences that decode first (one token each, and guesses where they pay), then prompts in chunks, under
one token budget (Sarathi-Serve, Agrawal et al. 2024). Before its first chunk a prompt gets as many pages as it needs at
once (`prompt_room.py`). When a running sequence finds no page, the least urgent one is preempted, and computed anew.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.decode_room import DecodeRoom
from pdserve.engine.guesses import Guesser
from pdserve.engine.kvcache import KvCache
from pdserve.engine.prompt_room import PromptRoom
from pdserve.engine.running_step import RunningStep, next_chunk
from pdserve.engine.sequence import Broken, Computed, Outcome, Sampled, Sequence, Split, Started, split
from pdserve.engine.speculation import Speculation
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult, Tokens
from pdserve.protocol.page_tables import Pages


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_speculative_tokens: int = 0  # most guesses that a step computes for a sequence
    can_pool: bool = True  # vectors can be made of prompts
    guesser: Guesser | None = None  # how they are made

    @property
    def most_rows(self) -> int:
        """Return how many tokens of a decoding sequence a step computes at most, and adds to it at most."""
        return 1 + self.num_speculative_tokens


_PUBLISHED_AT_ONCE = 32_768  # tokens of one sequence; hashing and indexing them takes 1.5 ms
_urgency = attrgetter("urgency")


class Scheduler:
    """Sequences of one worker, `waiting` for pages or `running`, and at most two running `steps`, the oldest first.

    A subclass may plan and end steps in its own way; others only read these three.
    """

    def __init__(self, cache: KvCache, limits: Limits) -> None:
        self.cache = cache
        self.limits = limits
        self.step_tokens = limits.max_num_batched_tokens  # most tokens of a step; may change between steps
        self.step_tokens_beside = limits.max_num_batched_tokens  # the same for a step in which something decodes
        self.num_preemptions = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.steps: deque[RunningStep] = deque()
        self.speculation = Speculation(limits.num_speculative_tokens, limits.guesser)
        self._decode_room = DecodeRoom(cache, self.running, self._preempt)
        self.prompt_room = PromptRoom(cache, self.running, self._preempt, limits.max_num_batched_tokens)

    @property
    def num_running(self) -> int:
        """Return how many continuations are in the batch, those still sharing a prompt counted each."""
        return sum([len(s.indices) for s in self.running])

    @property
    def waiting_tokens(self) -> int:
        """Return how many prompt tokens wait to be computed."""
        return sum([s.num_missing for s in (*self.waiting, *self.running) if s.phase is Phase.PROMPT])

    @property
    def pages_wanted(self) -> int:
        """Return how many pages sequences wait for."""
        return sum(self.most_pages(len(s.tokens)) for s in self.waiting)

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens' KV running sequences hold."""
        return sum(s.computed for s in self.running)

    @property
    def leaving(self) -> tuple[PageId, ...]:
        """Return the pages to release after the running steps, each as often as it is held."""
        return tuple(page for step in self.steps for pages in step.leaving for page in pages)

    def most_pages(self, num_tokens: int) -> int:
        """Return how many pages a sequence of so many tokens needs at most."""
        return self.cache.paging.most_pages(num_tokens, self.limits.max_num_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose tokens are to be computed."""
        self.waiting.append(sequence)
        self.waiting.sort(key=_urgency)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence run whose prompt is computed and whose pages are held for it."""
        self.running.append(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Compute nothing more of a sequence; it keeps its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            for step in self.steps:
                if sequence in step.sequences:
                    step.dropped.add(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give up its hold on its pages."""
        self.stop(sequence)
        self.speculation.remember(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up a sequence's hold on its pages; they stay reusable until given out again."""
        self._release(sequence.pages.held)
        sequence.forget_pages()

    def _release(self, pages: Pages) -> None:
        """Give up a hold on pages that running steps may read or write."""
        if self.steps:
            self.steps[-1].leaving.append(pages)
        else:
            self.cache.pool.release(pages)

    def hold(self, sequence: Sequence) -> bool:
        """Plan a running sequence no more until it is resumed; it keeps its pages. Running steps still add to it.

        True once it is in no running step.
        """
        sequence.is_held = True
        return not any(sequence in step.sequences for step in self.steps)

    def resume(self, sequence: Sequence) -> None:
        """Plan a held sequence again."""
        sequence.is_held = False

    def num_written(self, sequence: Sequence) -> int:
        """Return how many tokens' KV a decoding sequence may have once the running steps are over."""
        return sequence.computed + sum(step.num_rows(sequence) for step in self.steps)

    def plan(self, *, is_brief: bool = False) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute.

        While a step runs, also None if all that could be planned needs its tokens, or pages that only preemption frees,
        and if guesses are verified. A brief step computes few tokens of prompts, at most a page, and all that decodes.
        """
        if len(self.steps) > 1:
            raise InvariantError("planned a step while two are running")
        if not self.running and not self.waiting:
            return None
        step = RunningStep(self.steps[0].progress() if self.steps else {})
        decoding, prompts = self._plannable(step)
        guesses = self.speculation.counts(decoding)
        self.prompt_room.refill()
        if self.steps and (step.depends_on(guesses) or self._decode_room.lacks(step, decoding)):
            return None
        budget = min(self.step_tokens, self.step_tokens_beside) if decoding else self.step_tokens
        few = len(decoding) <= self.limits.max_num_seqs  # others may have joined: passes of drafts are bounded by it
        can_guess = not is_brief and few and (guesses or self.speculation.can_draft)
        num_spare = budget - len(decoding) - self._num_prompt_tokens(prompts) if can_guess else 0
        self.speculation.ask_for_drafts(decoding, guesses, num_spare)
        budget -= self._schedule_decoding(step, decoding, guesses, (budget, num_spare))
        budget = min(budget, self.cache.paging.few_tokens) if is_brief else budget
        for sequence, missing in prompts:
            count = min(budget, missing, self.prompt_room.of(step, sequence))
            if count > 0:
                budget -= count
                self.schedule(step, sequence, count)
        while budget > 0 and (first := next((s for s in self.waiting if s.is_ready), None)) is not None:
            is_full = self.running and self.num_running + len(first.indices) > self.limits.max_num_seqs
            if is_full or not self._admit(first):
                break
            count = min(budget, first.num_missing, self.prompt_room.of(step, first))
            budget -= count
            self.schedule(step, first, count)
        if prompts and not step.chunks and not self.steps:
            first, missing = prompts[0]
            if count := min(budget, missing, self.prompt_room.clear(step, first)):
                self.schedule(step, first, count)
        return self._begin(step)

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[Outcome, ...]:
        """Take in the oldest step's result. Sequences that ended or are handed off are no longer running."""
        outcomes: list[Outcome] = []
        step, page_size = self._end_step(), self.cache.page_size
        self.speculation.learn(step.sequences, plan, result)
        parts = zip(step.sequences, plan.chunks, result.tokens, strict=True)
        for place, (sequence, chunk, tokens) in enumerate(parts):
            if sequence in step.dropped:
                continue
            reason = result.failed.get(place) or result.stuck.get(place)
            if reason is not None:
                self.stop(sequence)
                outcomes.append(Broken(sequence, reason, is_stuck=place in result.stuck))
                continue
            was_prompt = sequence.phase is Phase.PROMPT
            sequence.computed += len(chunk.token_ids) if was_prompt else len(tokens[0])
            if not sequence.has_run:
                sequence.has_run = True
                outcomes.append(Started(sequence))
            if sequence.computed >= (sequence.num_published + 1) * page_size:
                self.publish(sequence)
            if was_prompt:
                outcomes.append(Computed(sequence))
            if result.prompts or result.pooled:
                outcomes += sequence.beside(place, chunk, result)
            if tokens and sequence.ends_with_prompt:
                outcomes += self._end_prompt(sequence, tokens)
            elif tokens:
                drafts = result.drafts.get(place, ())
                outcomes.append(self._append(sequence, result.computed(place, chunk), tokens[0], drafts))
        self.prompt_room.refill()
        return tuple(outcomes)

    def _begin(self, step: RunningStep) -> StepPlan | None:
        if not step.chunks:
            return None
        self.steps.append(step)
        return StepPlan(tuple(step.chunks), tuple(step.copies))

    def _end_step(self) -> RunningStep:
        """Return the oldest step, which is over, and release the pages that waited for it."""
        step = self.steps.popleft()
        for pages in step.leaving:
            self.cache.pool.release(pages)
        return step

    def _plannable(self, step: RunningStep) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """Return the running sequences that can be planned, the most urgent first.

        First those that decode; then prompts, with how many tokens they lack.
        """
        decoding: list[Sequence] = []
        prompts: list[tuple[Sequence, int]] = []
        for sequence in sorted(self.running, key=_urgency):
            if sequence.is_held or not sequence.is_ready:
                continue
            before = step.before.get(sequence)
            if before is not None and before.num_sampled:
                if self._is_foreseeable(sequence):
                    decoding.append(sequence)
            elif sequence.phase is Phase.DECODE:
                decoding.append(sequence)
            else:
                prompts.append((sequence, sequence.num_missing - (0 if before is None else before.num_tokens)))
        return decoding, prompts

    def _is_foreseeable(self, sequence: Sequence) -> bool:
        """Return whether what a running step will add to a sequence can be planned with: one token, not its last."""
        return not sequence.ends_with_prompt and sequence.num_left(self.limits.max_model_len) > 1

    def _schedule_decoding(
        self, step: RunningStep, decoding: list[Sequence], guesses: Mapping[Sequence, int], budgets: tuple[int, int]
    ) -> int:
        """Add decoding sequences to a step; return how many tokens that is. budgets: of tokens, and of guesses."""
        num_tokens, (budget, num_spare) = 0, budgets
        for num_before, sequence in enumerate(decoding, 1):
            if num_tokens >= budget or not sequence.pages:
                continue
            num_wanted = 1 + min(guesses.get(sequence, 0), max(0, num_spare))
            num_ahead = sequence.guessing.num_to_draft
            room = self._decode_room.make(step, sequence, num_wanted + num_ahead, len(decoding) - num_before)
            if count := min(room, num_wanted):
                sequence.guessing.num_to_draft = room - count
                num_tokens, num_spare = num_tokens + count, num_spare - (count - 1)
                self.schedule(step, sequence, count)
        return num_tokens

    def _num_prompt_tokens(self, prompts: list[tuple[Sequence, int]]) -> int:
        """Return how many tokens of prompts a step may compute: guesses get what these leave."""
        waiting = self.waiting if self.num_running < self.limits.max_num_seqs else ()
        return sum([missing for _, missing in prompts]) + sum([s.num_missing for s in waiting if s.is_ready])

    def schedule(self, step: RunningStep, sequence: Sequence, count: int) -> None:
        """Add the next `count` tokens of a sequence, guesses among them, to a step that is being planned."""
        step.add(sequence, next_chunk(sequence, step.progress_before(sequence), count, self.cache.paging))

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones, with the pages that it needs at once."""
        if not self.prompt_room.begin(sequence):
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(sequence)
        self.release(sequence)
        self.add(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Index the pages of a sequence that have become full, a bounded number at a time.

        Indexed pages that no later query sees are given up.
        """
        size, start = self.cache.page_size, sequence.num_published
        stop = min(sequence.computed, len(sequence.tokens), start * size + _PUBLISHED_AT_ONCE) // size
        self.cache.publish(sequence.prefix, sequence.pages, range(start, stop))
        sequence.num_published = stop
        if self.cache.paging.has_windows:
            left = sequence.pages.take_unneeded(self.cache.paging, min(sequence.computed, stop * size))
            self._release(left)

    def _append(self, sequence: Sequence, chunk: Chunk, tokens: Tokens, drafts: tuple[int, ...]) -> Sampled:
        """Give a sequence its next tokens, and guesses of those that follow."""
        position, limits = sequence.num_output_tokens, self.limits
        kept, finish = sequence.gain(tokens, limits.eos_token_ids, limits.max_model_len)
        verified = self.speculation.verified(sequence, chunk, min(len(kept), len(tokens) - 1))
        if len(tokens) > 1:  # pages that end within them could not be hashed before
            self.publish(sequence)
        if finish is None:
            sequence.phase = Phase.DECODE
            self.speculation.guess(sequence, drafts, sequence.num_left(limits.max_model_len) - 1)
        else:
            self.remove(sequence)
        return Sampled(sequence, sequence.indices[0], position, kept, finish, verified)

    def _end_prompt(self, sequence: Sequence, tokens: tuple[Tokens, ...]) -> list[Outcome]:
        """Split a computed prompt into its continuations with their first tokens, or leave it to a hand-off."""
        position, eos, limit = sequence.num_output_tokens, self.limits.eos_token_ids, self.limits.max_model_len
        sampled = [
            Sampled(sequence, index, position, first, sequence.finish_with(first[0].token_id, eos, limit))
            for index, first in zip(sequence.indices, tokens, strict=True)
        ]
        self.running.remove(sequence)
        if sequence.stop_after_prompt:
            return [*sampled]  # its pages are held until the hand-off is over
        children = split(self.cache.pool, sequence, [(one.index, one.tokens) for one in sampled if one.finish is None])
        if not children:
            self.release(sequence)
        self.running += children
        return [*sampled, Split(sequence, tuple(children))]
