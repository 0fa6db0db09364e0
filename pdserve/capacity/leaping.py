"""A scheduler that can do many identical decode steps at once, with the outcome of doing them one by one."""

from collections.abc import Callable

from pdserve.base.errors import InvariantError
from pdserve.engine.kvcache import KvCache
from pdserve.engine.running_step import RunningStep
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Outcome, Sequence
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, StepResult, Tokens
from pdserve.protocol.sampling import SampledToken, SamplingParams

OTHER, END = 0, 1  # tokens: one that goes on, and the end of a sequence
_GOES_ON, _ENDS = ((SampledToken(OTHER),),), ((SampledToken(END),),)
# Nothing is sampled here: only their number counts.
_SAMPLES = (SampleSpec(SamplingParams(), 0, 0, (), (), forbid_stops=False, sequence=(0, 0)),)

OutputLength = Callable[[bytes], int]  # of a request, by its id


class Leap(StepPlan):
    """Decode steps of all that runs, done at once: one step to the rest of a worker, which may be cut short."""

    def __init__(self, num_steps: int, sequences: int, kv_tokens: int) -> None:
        super().__init__(())
        self.num_steps = num_steps
        self.sequences = sequences
        self.kv_tokens = kv_tokens  # that the first step reads


class LeapingScheduler(Scheduler):
    """The engine's scheduler, which also leaps: over steps that only decode, during which no sequence ends.

    It also samples, in `commit`, by the lengths of answers.
    """

    def __init__(self, cache: KvCache, limits: Limits, output_length: OutputLength) -> None:
        super().__init__(cache, limits)
        self.leaps = True  # else each step is done by itself
        self._output_length = output_length
        self._left: list[int] = []  # tokens to come of each sequence of the leap, when it began

    def plan(self, *, is_brief: bool = False) -> StepPlan | None:
        num_steps = self.leap_length() if self.leaps else 0
        if not num_steps:
            return super().plan(is_brief=is_brief)
        running = self.running.copy()
        self.steps.append(RunningStep({}, running))
        return Leap(num_steps, len(running), sum([s.computed for s in running]) + len(running))

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[Outcome, ...]:
        """End a step or a leap. Sequences that go on decoding are not reported."""
        plan = self._leap(plan.num_steps) if isinstance(plan, Leap) else plan
        step, kept, sampled = self.steps[0], RunningStep({}), list[tuple[Tokens, ...]]()
        for sequence, chunk in zip(step.sequences, plan.chunks, strict=True):
            is_last = self._num_left(sequence) <= 1
            if is_last or chunk.phase is not Phase.DECODE or not sequence.has_run or sequence in step.dropped:
                kept.add(sequence, chunk)
                tokens = _ENDS if is_last else _GOES_ON
                sampled.append(tokens * len(sequence.indices) if chunk.samples else ())
            else:
                sequence.computed += 1
                sequence.tokens.append(OTHER)
                self._leave_windows(sequence)
        step.sequences = kept.sequences
        return super().commit(StepPlan(tuple(kept.chunks)), StepResult(tuple(sampled), result.elapsed_s))

    def _leap(self, num_steps: int) -> StepPlan:
        """Do that many steps of the leap under way. Return the last step of the sequences that are to be reported.

        These are sequences that end with it, and those that have not run before: their last step is not done yet.
        """
        last_step = RunningStep({})
        step, ahead = self.steps[0], [OTHER] * num_steps
        for sequence, left in zip(step.sequences, self._left, strict=True):
            if sequence in step.dropped:
                continue
            last = sequence.computed + num_steps
            self._add_pages(sequence, num_steps)
            if left > num_steps and sequence.has_run:
                sequence.tokens += ahead
                sequence.computed = last
                self._leave_windows(sequence)
            else:
                sequence.tokens += ahead[1:]
                sequence.computed = last - 1
                self.schedule(last_step, sequence, 1)
        step.sequences = last_step.sequences
        return StepPlan(tuple(last_step.chunks))

    def schedule(self, step: RunningStep, sequence: Sequence, count: int) -> None:
        start = sequence.computed
        samples = _SAMPLES if start + count == len(sequence.tokens) else ()
        step.add(sequence, Chunk(range(count), start, (), samples, sequence.phase))

    def leap_length(self) -> int:
        """Return how many steps can be done at once, the last of which may end sequences; 0 if none."""
        running = self.running
        if self.waiting or not running or len(running) > self.step_tokens:
            return 0
        if any(sequence.phase is not Phase.DECODE or sequence.is_held for sequence in running):
            return 0
        self._left = list(map(self._num_left, running))
        shortest = min(self._left)
        while shortest > 0 and not self._has_pages(shortest):
            shortest //= 2
        return max(0, shortest)

    def _num_left(self, sequence: Sequence) -> int:
        """Return how many tokens of an answer are to come."""
        job = sequence.job
        length = min(job.num_prompt_tokens + self._output_length(job.request_id), self.limits.max_model_len)
        return length - len(sequence.tokens)

    def _has_pages(self, num_steps: int) -> bool:
        """Return whether there are pages for that many steps of all that runs."""
        running, paging, num_free = self.running, self.cache.paging, self.cache.pool.num_free
        if len(running) * sum([-(-num_steps // size) for size in paging.sizes]) <= num_free:  # the most they can need
            return True
        if paging.is_single:
            span = paging.span
            return sum([-(-(s.computed + num_steps) // span) - len(s.pages.runs[0]) for s in running]) <= num_free
        return sum([sum(self._missing(s, s.computed + num_steps)) for s in running]) <= num_free

    def _missing(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return how many pages of each group a sequence lacks for so many tokens."""
        tables = sequence.pages
        parts = zip(self.cache.paging.sizes, tables.firsts, tables.runs, strict=True)
        return [max(0, -(-num_tokens // size) - first - len(run)) for size, first, run in parts]

    def _leave_windows(self, sequence: Sequence) -> None:
        """Give up the pages of a decoding sequence that have left their windows."""
        if self.cache.paging.has_windows:
            self._release(sequence.pages.take_unneeded(self.cache.paging, sequence.computed))

    def take_pages(self, num_steps: int) -> None:
        """Take the pages that the first steps of the leap under way have written to, before others are given any."""
        for sequence in self.steps[0].sequences:
            if sequence not in self.steps[0].dropped:
                self._add_pages(sequence, num_steps)

    def can_go_on(self, num_steps: int) -> bool:
        """Return whether the leap under way may do that many steps: nothing has come, and there are pages for it."""
        step = self.steps[0]
        unchanged = not self.waiting and len(self.running) == len(step.sequences) and not step.dropped
        return unchanged and not any(s.is_held for s in step.sequences) and self._has_pages(num_steps)

    def _add_pages(self, sequence: Sequence, num_steps: int) -> None:
        """Take the pages that a sequence does not have yet for that many steps."""
        last, size = sequence.computed + num_steps, self.cache.page_size
        if self.cache.paging.is_single and last <= len(sequence.pages.runs[0]) * size:  # by far the most frequent
            return
        if not self.cache.extend(sequence.pages, [-(-last // size) for size in self.cache.paging.sizes]):
            raise InvariantError("a leap ran out of pages")
