"""A draft model takes no more of a worker's time than a hundredth, and what its guesses save."""

import random
from dataclasses import dataclass, field

import pytest
from long_cases import long

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.guesses import DraftsBy
from pdserve.engine.running_step import Progress, next_chunk
from pdserve.engine.sequence import Job, Sequence
from pdserve.engine.speculation import Speculation
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult
from pdserve.perfmodel.curve import Step
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SampledToken, SamplingParams

STEP_S, ROW_S, PASS_S, FED_S = 0.05, 0.001, 0.005, 0.2 / 128  # of a draft model a tenth as large, on a CPU
QUARTER, LEAST = 0.25, 16  # of a step, and tokens of a prompt: for so much others wait at once


def sequence_of(prompt: int, order: int = 0, max_tokens: int = 20_000) -> Sequence:
    """Return a sequence that has its first token."""
    tokens = [*range(prompt), 1]
    job = Job(RequestId(bytes(16)), Attempt(0), tokens[:-1], prompt, SamplingParams(max_tokens=max_tokens), (0,))
    pages = PageTables((list(range(2000)),))
    return Sequence(job, (0,), tokens, order, phase=Phase.DECODE, computed=prompt, pages=pages)


@dataclass
class Timed:
    """Steps that take the time that they would, with guesses of which a share is right."""

    share: float
    step_s: float = STEP_S
    made: Speculation = field(default_factory=lambda: Speculation(5, DraftsBy(DraftSource.DRAFT_MODEL, 100_000)))
    elapsed_s: float = 0.0
    num_tokens: int = 0
    num_guesses: int = 0
    num_slow: int = 0  # steps after which more of prompts is computed than others are to wait for

    def __post_init__(self) -> None:
        self._drawn = random.Random(1)
        for _ in range(20):
            for rows in range(1, 60):
                self.made.observe(Step(sequences=rows, kv_tokens=300 * rows), self.step_s + ROW_S * rows)

    def step(self, batch: list[Sequence]) -> None:
        counts = self.made.counts(batch)
        self.made.ask_for_drafts(batch, counts, 500)
        chunks = [next_chunk(s, Progress(0, 0, 0), 1 + counts.get(s, 0), Paging.of(16)) for s in batch]
        tokens = [(SampledToken(1),) * (1 + self._num_right(chunk)) for chunk in chunks]
        drafts, draft_s = self._drafted(chunks)
        plain_s = self.step_s + ROW_S * sum(len(chunk.token_ids) for chunk in chunks)
        result = StepResult(tuple((each,) for each in tokens), plain_s + draft_s, drafts=drafts, draft_s=draft_s)
        self.made.learn(batch, StepPlan(tuple(chunks)), result)
        for place, (sequence, kept) in enumerate(zip(batch, tokens, strict=True)):
            sequence.tokens.extend([1] * len(kept))
            sequence.computed += len(kept)
            self.made.guess(sequence, drafts.get(place, ()), 1000)
            self.num_tokens += len(kept)
        self.elapsed_s += result.elapsed_s

    def _num_right(self, chunk: Chunk) -> int:
        wrong = (number for number in range(chunk.num_drafts) if self._drawn.random() >= self.share)
        return next(wrong, chunk.num_drafts)

    def _drafted(self, chunks: list[Chunk]) -> tuple[dict[int, tuple[int, ...]], float]:
        """Return the guesses, and what these and the prompts before them take."""
        asked = [(place, chunk, chunk.draft) for place, chunk in enumerate(chunks) if chunk.draft is not None]
        if not asked:
            return {}, 0.0
        num_fed = sum(len(draft.token_ids) for _, _, draft in asked)
        most = QUARTER * (self.step_s + ROW_S * sum(len(chunk.token_ids) for chunk in chunks)) / FED_S
        self.num_slow += num_fed > max(LEAST, 2 * most) + 3 * len(chunks)  # all may lack a few tokens
        whole = {place: draft.start + len(draft.token_ids) >= chunk.start for place, chunk, draft in asked}
        drafts = {place: (2,) * draft.num_guesses if whole[place] else () for place, _, draft in asked}
        self.num_guesses += sum(map(len, drafts.values()))
        return drafts, PASS_S * max(1, *map(len, drafts.values()), 0) + FED_S * num_fed


@pytest.mark.parametrize(
    ("prompt", "answer", "step_s", "has_guesses"),
    [
        (4000, 20, 0.002, False),
        (300, 100, STEP_S, True),
        *long(*((*case, False) for case in ((4000, 20, STEP_S), (300, 100, 0.002)))),
    ],
)
def test_a_draft_model_that_gains_nothing_takes_a_hundredth_of_the_time(
    prompt: int, answer: int, step_s: float, has_guesses: bool
) -> None:
    """All guesses are wrong, if answers are long enough for any. Steps of 2 ms are over before a prompt is computed."""
    timed, num_steps = Timed(0.0, step_s), 0
    while num_steps < 20_000:
        sequence = sequence_of(prompt)
        while len(sequence.tokens) < prompt + answer:
            timed.step([sequence])
            num_steps += 1
    assert timed.elapsed_s / (num_steps * (step_s + ROW_S)) < 1.015
    assert (timed.num_guesses > 0) == has_guesses


@pytest.mark.parametrize(("share", "least"), [(0.0, 0.96), (0.8, 1.3), *long((0.3, 0.96), (0.6, 1.15))])
def test_long_prompts_that_join_slow_the_other_sequences_down_by_less_than_guesses_gain(
    share: float, least: float
) -> None:
    timed, short, long = Timed(share), [sequence_of(100, number) for number in range(7)], sequence_of(4000, 7)
    for number in range(2000):
        if len(long.tokens) > 4030:
            long = sequence_of(4000, number + 8)
        timed.step([*short, long])
    plain_s = STEP_S + 8 * ROW_S
    assert timed.num_tokens / timed.elapsed_s > least * 8 / plain_s
    assert timed.num_slow == 0


def test_a_long_prompt_is_computed_once_the_answer_is_long_enough_to_pay_for_it() -> None:
    timed, sequence, num_steps = Timed(1.0), sequence_of(800), 0
    while not timed.num_guesses:
        timed.step([sequence])
        num_steps += 1
    assert 100 < num_steps < 150
    for max_tokens, begins in ((300, True), (100, False)):
        timed, sequence = Timed(1.0), sequence_of(800, max_tokens=max_tokens)
        while len(sequence.tokens) < sequence.length_limit:
            timed.step([sequence])
        assert bool(timed.num_guesses) == begins


def test_a_sequence_that_is_one_token_behind_does_not_wait_for_anothers_prompt() -> None:
    timed, long, short = Timed(1.0), sequence_of(4000), sequence_of(30, 1)
    long.tokens += [1] * 600
    long.computed += 600
    short.guessing.num_drafted = 30
    timed.step([long, short])
    assert timed.num_guesses > 0
    assert short.guessing.num_drafted == len(short.tokens)
