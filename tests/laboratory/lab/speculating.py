"""What speculative decoding gains: an engine alone answers the same requests with and without guesses, in turn."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import NamedTuple

import torch

from lab.decoding import step_of
from pdserve.base.ids import Attempt, RequestId
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import Phase, StepPlan, StepResult
from pdserve.engine.verification import Run, verifying
from pdserve.executor.draft_loading import lookup_of
from pdserve.model.layer_groups import layer_groups
from pdserve.model.loading import load_model
from pdserve.perfmodel.curve import Step
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import Quantization
from pdserve.settings.speculative import SpeculativeConfig

PAGE_SIZE, _CHUNK, _LONGEST = 16, 512, 1024
_COPIED, _SHOWN = 220, 24  # tokens of a text that is to be copied, and of its copy that the prompt begins with
_TRIED = (1, 2, 4, 8, 16, 32)  # rows of steps before the first request, as a worker's trial computes them
Trial = Sequence[tuple[int, float]]  # rows of steps, and seconds that they took
_GREEDY = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=120, ignore_eos=True)


@value
class Gain:
    """CPU seconds that all answers took after their prompts, and what guesses brought."""

    workload: str
    num_streams: int
    num_tokens: int  # of all answers
    without_s: float
    with_s: float
    speedup: float  # median over rounds of one divided by the other
    num_guesses: int
    num_right: int
    num_equal: int  # answers of the last round that are the same, of as many as there are streams


class Answering:
    """One set of requests, answered by a scheduler of its own."""

    def __init__(self, scheduler: Scheduler, run: Run) -> None:
        self._scheduler = scheduler
        self._run = run
        self.answers: dict[int, list[int]] = {}
        self.taken_s = 0.0  # by steps that only decode, and their planning
        self.num_guesses = self.num_right = 0

    def run(self) -> None:
        began_s = process_time()
        while (plan := self._scheduler.plan()) is not None:
            result = self._run(plan)
            for outcome in self._scheduler.commit(plan, result):
                if isinstance(outcome, Sampled):
                    number = int.from_bytes(outcome.sequence.job.request_id)
                    self.answers.setdefault(number, []).extend(token.token_id for token in outcome.tokens)
            ended_s = process_time()
            if all(chunk.phase is Phase.DECODE for chunk in plan.chunks):
                self.taken_s += ended_s - began_s
            self._count(plan, result)
            began_s = process_time()

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        for chunk, tokens in zip(plan.chunks, result.tokens, strict=True):
            if chunk.num_drafts:
                self.num_guesses += chunk.num_drafts
                self.num_right += len(tokens[0]) - 1


def trial_of(runner: Runner) -> Trial:
    plans = [(rows, step_of(rows, PAGE_SIZE, num_groups=len(runner.groups))) for rows in _TRIED]
    return [(rows, min(runner.run(plan).elapsed_s for _ in range(3))) for rows, plan in plans]


def scheduler_of(limits: Limits, runner: Runner, trial: Trial) -> Scheduler:
    """Return a scheduler that knows what steps take, as a worker's does from its trial."""
    scheduler = Scheduler(KvCache(len(runner.kv), paging_of(runner.groups), None), limits)
    for rows, elapsed_s in trial:
        scheduler.speculation.observe(Step(sequences=rows, kv_tokens=rows * PAGE_SIZE), elapsed_s)
    return scheduler


def answered(scheduler: Scheduler, run: Run, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Answering:
    """Answer prompts, each with a seed of its own."""
    for number, prompt in enumerate(prompts):
        own = replace(params, seed=number)
        job = Job(RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), own, (0,))
        scheduler.add(EngineSequence(job, (0,), list(prompt), order=number))
    made = Answering(scheduler, run)
    made.run()
    return made


class Compared(NamedTuple):
    """CPU seconds without and with guesses, and the median of the rounds' ratios; guesses of the last round."""

    without_s: float
    with_s: float
    speedup: float
    num_guesses: int
    num_equal: int  # answers that are the same


def in_turn(
    plain: Callable[[], Answering], guessing: Callable[[], Answering], rounds: int
) -> tuple[Answering, Compared]:
    """Answer the same requests without guesses and with them, round after round; return the last answers with them."""
    made = [(plain(), guessing()) for _ in range(rounds)]
    taken_s = [(one.taken_s, other.taken_s) for one, other in made]
    without_s, with_s = (median(times) for times in zip(*taken_s, strict=True))
    one, other = made[-1]
    num_equal = sum(one.answers[number] == other.answers[number] for number in one.answers)
    speedup = median(before / after for before, after in taken_s)
    return other, Compared(without_s, with_s, speedup, other.num_guesses, num_equal)


class SpeculationBench:
    """One model; each run has a scheduler of its own over the same pages."""

    def __init__(
        self, path: Path, dtype: str, quantization: Quantization, most_streams: int, guessed: SpeculativeConfig
    ) -> None:
        checkpoint = open_checkpoint(path)
        form = choose_quantization(quantization, checkpoint, dtype, "cpu")
        model = load_model(checkpoint.config, weights_in_form(checkpoint, form), getattr(torch, dtype))
        self._limits = Limits(most_streams, _CHUNK, _LONGEST, frozenset())
        most = paging_of(layer_groups(model.config, PAGE_SIZE)).most_pages(_LONGEST, _CHUNK)
        self._runner = Runner(model, max(most_streams, _TRIED[-1]) * most, PAGE_SIZE, ())
        self._tokenizer, self._vocab_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
        self._guessed = guessed
        self._trial = trial_of(self._runner)

    def copying(self, texts: Sequence[str], rounds: int) -> Gain:
        """Let the model copy texts, greedily."""
        begin, again = map(self._encode, ("The text:\n\n", "\n\nThe same text again, word for word:\n\n"))
        copied = [self._encode(text)[:_COPIED] for text in texts]
        prompts = [[*begin, *tokens, *again, *tokens[:_SHOWN]] for tokens in copied]
        return self._measured("copy", prompts, _GREEDY, rounds)

    def random(self, num_streams: int, rounds: int) -> Gain:
        """Let it go on after random tokens, at temperature 1."""
        drawn = random.Random(7)
        prompts = [[drawn.randrange(self._vocab_size) for _ in range(_COPIED)] for _ in range(num_streams)]
        return self._measured("random", prompts, _SAMPLED, rounds)

    def again(self, texts: Sequence[str], rounds: int) -> Gain:
        """Let it go on after texts, and when it has, after the same texts behind another number, greedily."""
        prompts = [self._encode(f"Text {number}\n\n{text}")[:_COPIED] for number in range(2) for text in texts]
        return self._measured("again", prompts, _GREEDY, rounds, len(texts))

    def _measured(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        rounds: int,
        num_streams: int | None = None,
    ) -> Gain:
        """num_streams: answers at once; None: all of them."""
        at_once = num_streams or len(prompts)
        guessing, gain = in_turn(
            lambda: self._run(prompts, params, None, at_once),
            lambda: self._run(prompts, params, self._guessed, at_once),
            rounds,
        )
        num_tokens = sum(map(len, guessing.answers.values()))
        return Gain(name, at_once, num_tokens, num_right=guessing.num_right, **gain._asdict())

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        guessed: SpeculativeConfig | None,
        num_streams: int,
    ) -> Answering:
        limits = replace(self._limits, max_num_seqs=num_streams)
        if guessed is not None:
            counted = guessed.num_speculative_tokens
            limits = replace(limits, num_speculative_tokens=counted, guesser=lookup_of(guessed))
        scheduler = scheduler_of(limits, self._runner, self._trial)
        return answered(scheduler, verifying(self._runner.run), prompts, params)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def measure_speculation(
    bench: SpeculationBench, counts: Sequence[int], texts: Sequence[str], rounds: int
) -> Iterator[Gain]:
    for count in counts:
        yield bench.copying(texts[:count], rounds)
        yield bench.random(count, rounds)
        yield bench.again(texts[:count], rounds)
