"""What speculative decoding gains: an engine alone answers the same requests with and without guesses, in turn."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time

import torch

from pdserve.base.ids import Attempt, RequestId
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.guesses import NgramLookup
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import Phase
from pdserve.engine.verification import verifying
from pdserve.model.loading import load_model
from pdserve.perfmodel.curve import Step
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.speculative import SpeculativeConfig

_PAGE_SIZE, _CHUNK, _LONGEST = 16, 512, 2048
_COPIED, _SHOWN = 220, 24  # tokens of a text that is to be copied, and of its copy that the prompt begins with
_TRIED = (1, 2, 4, 8, 16, 32)  # rows of steps before the first request, as a worker's trial computes them


@value
class Gain:
    """CPU seconds of one thread that answers took, medians over rounds, and what guesses brought."""

    workload: str
    num_streams: int
    num_tokens: int  # of all answers
    without_s: float
    with_s: float
    num_guesses: int
    num_right: int
    num_equal: int  # answers, of as many as there are streams

    @property
    def speedup(self) -> float:
        return self.without_s / self.with_s


class Engine:
    """One model, with schedulers that share its pages one after the other."""

    def __init__(self, path: Path, dtype: str, quantization: str, most: int) -> None:
        checkpoint = open_checkpoint(path)
        form = choose_quantization(quantization, checkpoint, dtype, "cpu")
        model = load_model(checkpoint.config, weights_in_form(checkpoint, form), getattr(torch, dtype))
        self.num_pages = most * (_LONGEST // _PAGE_SIZE)
        self.limits = Limits(most, max(_CHUNK, 16 * most), _LONGEST, frozenset())
        self.runner = Runner(model, self.num_pages, _PAGE_SIZE, ())
        self.tokenizer = checkpoint.tokenizer()
        self.vocab_size = checkpoint.config.vocab_size

    def answers(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, guessed: SpeculativeConfig | None
    ) -> tuple[float, dict[int, list[int]], tuple[int, int]]:
        """Return the seconds of steps that only decode and their planning, the answers, and guesses made and right."""
        limits = self.limits
        if guessed is not None:
            lookup = NgramLookup(guessed.prompt_lookup_min, guessed.prompt_lookup_max)
            limits = replace(limits, num_speculative_tokens=guessed.num_speculative_tokens, lookup=lookup)
        scheduler = Scheduler(KvCache(self.num_pages, Paging.of(_PAGE_SIZE), None), limits)
        run = verifying(self.runner.run)
        for rows, elapsed_s in self.trial:
            scheduler.speculation.observe(Step(sequences=rows, kv_tokens=rows * 16), elapsed_s)
        for number, prompt in enumerate(prompts):
            own = replace(params, seed=number)
            job = Job(RequestId(number.to_bytes(16)), Attempt(0), tuple(prompt), len(prompt), own, (0,))
            scheduler.add(EngineSequence(job, (0,), list(prompt), order=number))
        answers: dict[int, list[int]] = {}
        taken_s, num_guesses, num_right, began_s = 0.0, 0, 0, process_time()
        while (plan := scheduler.plan()) is not None:
            result = run(plan)
            for outcome in scheduler.commit(plan, result):
                if isinstance(outcome, Sampled):
                    number = int.from_bytes(outcome.sequence.job.request_id)
                    answers.setdefault(number, []).extend(token.token_id for token in outcome.tokens)
            ended_s = process_time()
            if all(chunk.phase is Phase.DECODE for chunk in plan.chunks):
                taken_s += ended_s - began_s
            num_guesses += sum(chunk.num_drafts for chunk in plan.chunks)
            num_right += sum(len(t[0]) - 1 for t, c in zip(result.tokens, plan.chunks, strict=True) if c.num_drafts)
            began_s = ended_s
        return taken_s, answers, (num_guesses, num_right)

    def try_steps(self) -> None:
        """Compute steps of single tokens, so that schedulers know what rows cost."""
        self.trial = [
            (rows, min(self._step_s(rows) for _ in range(3))) for rows in _TRIED if rows <= 8 * self.num_pages
        ]

    def _step_s(self, rows: int) -> float:
        from lab.decoding import step_of  # noqa: PLC0415

        return self.runner.run(step_of(rows, _PAGE_SIZE)).elapsed_s


def copied(engine: Engine, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield prompts after which a model copies a text."""
    for text in texts:
        tokens = engine.tokenizer.encode(text, add_special=False)[:_COPIED]
        begin = engine.tokenizer.encode("The text:\n\n", add_special=False)
        again = engine.tokenizer.encode("\n\nThe same text again, word for word:\n\n", add_special=False)
        yield [*begin, *tokens, *again, *tokens[:_SHOWN]]


def random_prompts(engine: Engine, count: int, length: int = _COPIED) -> list[list[int]]:
    drawn = random.Random(7)
    return [[drawn.randrange(engine.vocab_size) for _ in range(length)] for _ in range(count)]


def measure_speculation(
    engine: Engine,
    name: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    rounds: int,
    guessed: SpeculativeConfig,
) -> Gain:
    """Answer prompts at once, without and with guesses in turn."""
    without, with_guesses = [], []
    for _ in range(rounds):
        plain_s, plain, _ = engine.answers(prompts, params, None)
        guessed_s, answers, (num_guesses, num_right) = engine.answers(prompts, params, guessed)
        without.append(plain_s)
        with_guesses.append(guessed_s)
    num_equal = sum(plain[number] == answers[number] for number in plain)
    num_tokens = sum(map(len, answers.values()))
    return Gain(
        name, len(prompts), num_tokens, median(without), median(with_guesses), num_guesses, num_right, num_equal
    )
