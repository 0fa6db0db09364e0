"""An answer that a worker's engine writes, as its configuration loads it."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from scheduled import sequence_of
from worker_settings import built, settings_of

from pdserve.engine.sequence import Sampled
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.boot import Engine

PROMPT = (7, 8, 9)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Guessed(NamedTuple):
    """An answer, and how many guesses were verified and right."""

    tokens: list[int]
    num_guesses: int
    num_right: int
    drafts: dict[int, tuple[int, ...]]  # by how many tokens are before them


def written(model: Path, params: SamplingParams = GREEDY, **settings: object) -> tuple[list[int], int]:
    """Let a worker's engine write an answer; return it, and how many guesses were verified."""
    return guessed(model, params, **settings)[:2]


def guessed(model: Path, params: SamplingParams, prompt: Seq[int] = PROMPT, **settings: object) -> Guessed:
    """Let a worker's engine write an answer to a prompt."""
    return all_guessed(model, params, [prompt], **settings)[0]


def all_guessed(model: Path, params: SamplingParams, prompts: Seq[Seq[int]], **settings: object) -> list[Guessed]:
    """Let a worker's engine write answers to prompts, one after another."""
    own = {"num_pages": 16, "dtype": "float32", "max_num_seqs": 2, "max_model_len": 64}
    engine = built(settings_of(model, **{**own, **settings}))
    try:
        return [_answered(engine, number, prompt, params) for number, prompt in enumerate(prompts)]
    finally:
        engine.executor.close()


def _answered(engine: Engine, number: int, prompt: Seq[int], params: SamplingParams) -> Guessed:
    scheduler, tokens, num_guesses, num_right = engine.scheduler, list[int](), 0, 0
    drafts = dict[int, tuple[int, ...]]()
    scheduler.add(sequence_of(number, prompt, params))
    while (plan := scheduler.plan()) is not None:
        result = engine.executor.start(plan).result()
        for chunk, sampled in zip(plan.chunks, result.tokens, strict=True):
            num_guesses += chunk.num_drafts
            num_right += len(sampled[0]) - 1 if chunk.num_drafts else 0
        assert not result.failed
        assert not result.num_draft_failures
        outcomes = [outcome for outcome in scheduler.commit(plan, result) if isinstance(outcome, Sampled)]
        tokens += [token.token_id for each in outcomes for token in each.tokens]
        drafts |= {len(tokens): guesses for guesses in result.drafts.values()}
    return Guessed(tokens, num_guesses, num_right, drafts)
