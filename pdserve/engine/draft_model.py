"""What a runner's draft model has computed of sequences, what it costs, and what it is asked for next. Pure.

Invariant: the first `num_drafted` tokens of a decoding sequence are those whose KV the draft model has written last to
their places in the sequence's pages. Where others have written there since, guesses are wrong, and no token is.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult
from pdserve.engine.timed_steps import TimedSteps
from pdserve.perfmodel.curve import ENOUGH_STEPS, Step

_FED_AT_ONCE = 128  # tokens that the draft model takes in after one step, so that no other sequence waits for long


class DraftModel:
    """The draft model of one worker, as its scheduler knows it."""

    def __init__(self, max_model_len: int) -> None:
        """max_model_len: tokens of the longest sequence for which it is used."""
        self._max_model_len = max_model_len
        self._passes = TimedSteps()
        self._num_passes = 0
        self.has_failed = False

    @property
    def knows_costs(self) -> bool:
        return self._num_passes >= ENOUGH_STEPS

    def learn(self, sequences: Seq[Sequence], plan: StepPlan, result: StepResult) -> None:
        """Take in what has been drafted after a step. sequences: parallel to the plan's chunks."""
        drafted: list[Chunk] = []
        for place, (sequence, chunk) in enumerate(zip(sequences, plan.chunks, strict=True)):
            if chunk.draft is None or place in result.failed or place in result.stuck:
                continue
            if place not in result.drafts:
                self.has_failed = True
            elif sequence.phase is Phase.DECODE:  # else it has given up its pages
                drafted.append(chunk)
                reached = chunk.draft.start + len(chunk.draft.token_ids)
                is_whole = reached >= chunk.start
                num_kept = len(result.tokens[place][0])
                sequence.guessing.num_drafted = chunk.start + num_kept + 1 if is_whole else reached
        self._learn_cost(drafted, result)

    def _learn_cost(self, drafted: list[Chunk], result: StepResult) -> None:
        """Take in what passes took, where nothing else was computed but guesses."""
        if not drafted or any(chunk.draft is None or chunk.draft.token_ids for chunk in drafted):
            return
        num_guesses = [len(guesses) for guesses in result.drafts.values()]
        if num_passes := max(num_guesses, default=0):
            num_rows = -(-sum(num_guesses) // num_passes)
            kv_tokens = sum([chunk.start for chunk in drafted]) * num_rows // len(drafted)
            self._num_passes += num_passes
            self._passes.learn(Step(sequences=num_rows, kv_tokens=kv_tokens), result.draft_s / num_passes)

    def seconds(self, num_guesses: int, num_passes: int, kv_each: float) -> float:
        """Return how long so many guesses take, as many of them in one pass as in another."""
        num_rows = -(-num_guesses // num_passes)
        return num_passes * self._passes.costs.decode_s(num_rows, num_rows * kv_each)

    def most(self, sequence: Sequence, num_verified: int) -> int:
        """Return how many guesses of a sequence are of use once a step has verified so many."""
        return min(self._max_model_len, sequence.length_limit) - 2 - len(sequence.tokens) - num_verified

    def ask(self, decoding: Seq[Sequence], wanted: Mapping[Sequence, int]) -> None:
        """Say how many guesses are wanted of sequences after their next step, and what is computed before them."""
        num_left = _FED_AT_ONCE
        for sequence in decoding:
            known, count = sequence.guessing, wanted.get(sequence, 0)
            lacking = max(0, len(sequence.tokens) - known.num_drafted)
            known.num_to_feed = min(lacking, num_left)
            known.num_to_draft = count if known.num_to_feed or not lacking else 0
            if count:
                num_left -= known.num_to_feed
