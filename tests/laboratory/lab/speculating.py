"""What speculative decoding gains: an engine alone answers the same requests with and without guesses, in turn."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time

import torch

from lab.decoding import step_of
from pdserve.base.ids import Attempt, RequestId
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import Phase, StepPlan, StepResult
from pdserve.engine.verification import Run, verifying
from pdserve.executor.draft_loading import lookup_of
from pdserve.model.loading import load_model
from pdserve.perfmodel.curve import Step
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import Quantization
from pdserve.settings.speculative import SpeculativeConfig

_PAGE_SIZE, _CHUNK, _LONGEST = 16, 512, 1024
_COPIED, _SHOWN = 220, 24  # tokens of a text that is to be copied, and of its copy that the prompt begins with
_TRIED = (1, 2, 4, 8, 16, 32)  # rows of steps before the first request, as a worker's trial computes them
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


class SpeculationBench:
    """One model; each run has a scheduler of its own over the same pages."""

    def __init__(
        self, path: Path, dtype: str, quantization: Quantization, most_streams: int, guessed: SpeculativeConfig
    ) -> None:
        checkpoint = open_checkpoint(path)
        form = choose_quantization(quantization, checkpoint, dtype, "cpu")
        model = load_model(checkpoint.config, weights_in_form(checkpoint, form), getattr(torch, dtype))
        self._num_pages = most_streams * (_LONGEST // _PAGE_SIZE)
        self._limits = Limits(most_streams, _CHUNK, _LONGEST, frozenset())
        self._runner = Runner(model, self._num_pages, _PAGE_SIZE, ())
        self._tokenizer, self._vocab_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
        self._guessed = guessed
        self._trial = [(rows, min(self._step_s(rows) for _ in range(3))) for rows in _TRIED]

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
        pairs, at_once = [], num_streams or len(prompts)
        for _ in range(rounds):
            plain, guessing = (self._run(prompts, params, guessed, at_once) for guessed in (None, self._guessed))
            pairs.append((plain.taken_s, guessing.taken_s))
        without_s, with_s = (median(times) for times in zip(*pairs, strict=True))
        return Gain(
            workload=name,
            num_streams=at_once,
            num_tokens=sum(map(len, guessing.answers.values())),
            without_s=without_s,
            with_s=with_s,
            speedup=median(one / other for one, other in pairs),
            num_guesses=guessing.num_guesses,
            num_right=guessing.num_right,
            num_equal=sum(plain.answers[number] == guessing.answers[number] for number in plain.answers),
        )

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
        scheduler = Scheduler(KvCache(self._num_pages, Paging.of(_PAGE_SIZE), None), limits)
        for rows, elapsed_s in self._trial:
            scheduler.speculation.observe(Step(sequences=rows, kv_tokens=rows * _PAGE_SIZE), elapsed_s)
        for number, prompt in enumerate(prompts):
            own = replace(params, seed=number)
            job = Job(RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), own, (0,))
            scheduler.add(EngineSequence(job, (0,), list(prompt), order=number))
        made = Answering(scheduler, verifying(self._runner.run))
        made.run()
        return made

    def _step_s(self, rows: int) -> float:
        return self._runner.run(step_of(rows, _PAGE_SIZE)).elapsed_s

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def measure_speculation(
    bench: SpeculationBench, counts: Sequence[int], texts: Sequence[str], rounds: int
) -> Iterator[Gain]:
    for count in counts:
        yield bench.copying(texts[:count], rounds)
        yield bench.random(count, rounds)
        yield bench.again(texts[:count], rounds)
