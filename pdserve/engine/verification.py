"""Verifies guesses on runners that compute single tokens: each token of a chunk with guesses becomes a row of its own.

Invariant: the tokens are those of steps without guesses. A row's token is sampled with the noise, the penalties and the
grammar of its own index, and is kept while all guesses before it are what was sampled there (coupled sampling: Daliri,
Musco, Suresh 2024). No row reads KV of a guess behind it. KV of guesses that were wrong lies behind what the sequence
counts as computed, where the next step writes.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from pdserve.base.errors import InvariantError
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, StepResult, Tokens

Run = Callable[[StepPlan], StepResult]


def verifying(run: Run) -> Run:
    """Return what runs steps with guesses on a runner that verifies none."""

    def run_and_verify(plan: StepPlan) -> StepResult:
        if not plan.has_guesses:
            return run(plan)
        rows = [_rows(chunk) for chunk in plan.chunks]
        return _folded(plan, run(StepPlan(tuple([row for of in rows for row in of]), plan.copies)))

    return run_and_verify


def _rows(chunk: Chunk) -> list[Chunk]:
    """Return a chunk of its last known token and guesses as chunks of a token each."""
    if not chunk.num_drafts:
        return [chunk]
    (spec,), guesses = chunk.samples, chunk.token_ids[-chunk.num_drafts :]
    return [
        replace(
            chunk,
            token_ids=(token_id,),
            start=chunk.start + number,
            samples=(behind(spec, guesses[:number]),),
            phase=Phase.DECODE,
            num_drafts=0,
            continues=number > 0,
        )
        for number, token_id in enumerate(chunk.token_ids)
    ]


def behind(spec: SampleSpec, guesses: Seq[int]) -> SampleSpec:
    """Return what to sample once these guesses have turned out right."""
    if not guesses:
        return spec
    index, output_ids = spec.index + len(guesses), spec.output_ids
    if output_ids:  # else nobody reads them: a sequence that decodes has some
        output_ids = array("q", output_ids)
        output_ids.extend(guesses)
    return replace(spec, index=index, output_ids=output_ids, forbid_stops=index < spec.params.min_tokens)


def _folded(plan: StepPlan, result: StepResult) -> StepResult:
    """Return the result of rows as that of their chunks."""
    tokens: list[tuple[Tokens, ...]] = []
    stuck: dict[int, str] = {}
    places: dict[int, int] = {}  # of chunks, by that of their first row
    first = 0
    for place, chunk in enumerate(plan.chunks):
        places[first] = place
        if first in result.stuck:
            stuck[place] = result.stuck[first]
        if chunk.num_drafts:
            rows = range(first, first + 1 + chunk.num_drafts)
            tokens.append((_kept(chunk, [result.tokens[row] for row in rows], [row in result.stuck for row in rows]),))
        else:
            tokens.append(result.tokens[first])
        first += 1 + chunk.num_drafts
    if result.failed or result.drafts:
        raise InvariantError("a runner that verifies no guesses names failed rows, or guesses")
    prompts = {places[row]: scores for row, scores in result.prompts.items()}
    pooled = {places[row]: vector for row, vector in result.pooled.items()}
    return replace(result, tokens=tuple(tokens), stuck=stuck, prompts=prompts, pooled=pooled)


def _kept(chunk: Chunk, sampled: Seq[tuple[Tokens, ...]], is_stuck: Seq[bool]) -> Tokens:
    """Return what was sampled up to the first token that is not the guess, or before a row that is stuck.

    A grammar that lets nothing follow a kept guess says so again in the next step, where that is the first row.
    """
    guesses, first_tokens = chunk.token_ids[-chunk.num_drafts :], [of[0][0] for of in sampled]
    return tuple(first_tokens[: num_kept(guesses, [token.token_id for token in first_tokens], is_stuck)])


def num_kept(guesses: Seq[int], sampled: Seq[int], is_stuck: Seq[bool]) -> int:
    """Return how many rows of a chain are final, whose inputs are a known token and guesses: as many tokens are kept.

    sampled: in each row, and so is `is_stuck`, which says that a grammar lets nothing follow.
    """
    count = 1
    for guess, token_id, next_is_stuck in zip(guesses, sampled, is_stuck[1:], strict=False):
        if token_id != guess or next_is_stuck:
            break
        count += 1
    return count
