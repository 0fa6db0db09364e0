"""A scheduler that can do many identical decode steps at once, with the outcome of doing them one by one."""

from collections.abc import Callable

from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, SampledToken, StepPlan, StepResult
from pdserve.errors import InvariantError

OTHER, END = 0, 1  # tokens: one that goes on, and the end of a sequence

OutputLength = Callable[[bytes], int]  # of a request, by its id


class LeapingScheduler(Scheduler):
    """The engine's scheduler, which also leaps: over steps that only decode, during which no sequence ends."""

    def __init__(self, cache: KvCache, limits: Limits, output_length: OutputLength) -> None:
        super().__init__(cache, limits)
        self._output_length = output_length

    def draw(self, plan: StepPlan, elapsed_s: float) -> StepResult:
        """Return what the step that is planned brings."""
        tokens = tuple([self._token(s) if c.samples else () for s, c in zip(self._planned, plan.chunks, strict=True)])
        return StepResult(tokens, elapsed_s)

    def _token(self, sequence: Sequence) -> tuple[SampledToken, ...]:
        is_last = sequence.num_output_tokens + 1 >= self._output_length(sequence.job.request_id)
        return (SampledToken(END if is_last else OTHER),) * len(sequence.indices)

    def leap_length(self) -> int:
        """Return how many steps can be done at once, the last of which may end sequences; 0 if none."""
        running = self._running
        if self._waiting or not running or not all(map(_is_decoding, running)):
            return 0
        length_of = self._output_length
        length = min([length_of(s.job.request_id) - len(s.tokens) + s.job.num_prompt_tokens for s in running])
        if self.num_running > self.limits.max_num_batched_tokens:
            return 0
        while length > 0 and self._pages_needed(length) > self.cache.pool.num_free:
            length //= 2
        return max(0, length)

    def _pages_needed(self, num_steps: int) -> int:
        size = self.cache.page_size
        return sum([-(-(s.computed + num_steps) // size) - len(s.pages) for s in self._running])

    def batch(self) -> tuple[int, int]:
        """Return how many sequences the next decode step has, and how many KV tokens they read."""
        return len(self._running), sum([s.computed for s in self._running]) + len(self._running)

    def leap(self, num_steps: int) -> StepPlan:
        """Do that many steps but the last one of sequences of which something is to be told: return that one.

        Told is of sequences that end, and of those that have not run before.
        """
        if self._planned:
            raise InvariantError("leapt while a step is running")
        chunks: list[Chunk] = []
        size, length_of, ahead = self.cache.page_size, self._output_length, [OTHER] * num_steps
        for sequence in self._running:
            job, tokens = sequence.job, sequence.tokens
            left = length_of(job.request_id) - len(tokens) + job.num_prompt_tokens
            if sequence.computed + num_steps > len(sequence.pages) * size:
                self._add_pages(sequence, num_steps)
            if left > num_steps and sequence.has_run:
                tokens.extend(ahead)
                sequence.computed += num_steps
            else:
                tokens.extend(ahead[1:])
                sequence.computed += num_steps - 1
                self._schedule(sequence, 1, chunks)
        return StepPlan(tuple(chunks))

    def _add_pages(self, sequence: Sequence, num_steps: int) -> None:
        pages = self.cache.take(self.cache.num_pages(sequence.computed + num_steps) - len(sequence.pages))
        if pages is None:
            raise InvariantError("a leap ran out of pages")
        sequence.pages.extend(pages)


def _is_decoding(sequence: Sequence) -> bool:
    length = len(sequence.tokens)
    is_after_prompt = length > sequence.job.num_prompt_tokens
    return is_after_prompt and length - sequence.computed == 1 and len(sequence.indices) == 1
