"""A scheduler whose answers have lengths that are known beforehand."""

from collections.abc import Callable

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


class AnswerScheduler(Scheduler):
    """The engine's scheduler, which also samples, in `commit`, by the lengths of answers."""

    def __init__(self, cache: KvCache, limits: Limits, output_length: OutputLength) -> None:
        super().__init__(cache, limits)
        self._output_length = output_length

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[Outcome, ...]:
        """End a step. Sequences that go on decoding are not reported: to report them takes longer than all else."""
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
                if self.cache.paging.has_windows:
                    self._release(sequence.pages.take_unneeded(self.cache.paging, sequence.computed))
        step.sequences = kept.sequences
        return super().commit(StepPlan(tuple(kept.chunks)), StepResult(tuple(sampled), result.elapsed_s))

    def schedule(self, step: RunningStep, sequence: Sequence, count: int) -> None:
        start = sequence.computed
        samples = _SAMPLES if start + count == len(sequence.tokens) else ()
        step.add(sequence, Chunk(range(count), start, (), samples, sequence.phase))

    def _num_left(self, sequence: Sequence) -> int:
        """Return how many tokens of an answer are to come."""
        job = sequence.job
        length = min(job.num_prompt_tokens + self._output_length(job.request_id), self.limits.max_model_len)
        return length - len(sequence.tokens)
