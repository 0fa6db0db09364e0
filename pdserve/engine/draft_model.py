"""What a runner's draft model has computed of sequences, what it costs, and what it is asked for next. Pure.

Invariant: the first `num_drafted` tokens of a decoding sequence are those whose KV the draft model has written last to
their places in the sequence's pages. Where others have written there since, guesses are wrong, and no token is.

Where guesses pay nothing, some are tried to learn whether they do: as many as take a hundredth of all steps' time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult
from pdserve.engine.timed_steps import TimedSteps
from pdserve.perfmodel.curve import ENOUGH_STEPS, Step

_FED_AT_ONCE = 128  # tokens that the draft model takes in after one step, so that no other sequence waits for long
_FED_SHARE = 0.5  # most time for a sequence's tokens, of what it still takes without guesses if it is as long as can be
_TIMED_TOKENS = 32  # taken in at once, at least, for the time of each to be learnt
_KEPT = 0.8  # weight of what was learnt of that time before
_TRIED = 4  # guesses at once
_SHARE_FOR_TRIALS = 0.01  # of the time
_MOST_FOR_TRIALS_S = 1.0  # that is saved up


class DraftModel:
    """The draft model of one worker, as its scheduler knows it."""

    def __init__(self, max_model_len: int) -> None:
        """max_model_len: tokens of the longest sequence for which it is used."""
        self._max_model_len = max_model_len
        self._passes = TimedSteps()
        self._num_timed = 0
        self._fed_s = 0.0  # of each token
        self._for_trials_s = 0.0
        self._is_trying = False  # until guesses are made
        self.has_failed = False

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
        saved_s = self._for_trials_s + _SHARE_FOR_TRIALS * result.elapsed_s
        self._for_trials_s = min(_MOST_FOR_TRIALS_S, saved_s) - (result.draft_s if self._is_trying else 0.0)
        self._is_trying &= not any(result.drafts.values())

    def _learn_cost(self, drafted: list[Chunk], result: StepResult) -> None:
        """Take in what passes took where nothing else was computed but guesses, or what tokens before them took."""
        num_fed = sum([len(chunk.draft.token_ids) for chunk in drafted if chunk.draft is not None])
        if num_fed >= _TIMED_TOKENS:
            each_s = result.draft_s / num_fed
            self._fed_s = _KEPT * self._fed_s + (1 - _KEPT) * each_s if self._fed_s else each_s
        if not drafted or num_fed:
            return
        num_guesses = [len(guesses) for guesses in result.drafts.values()]
        if num_passes := max(num_guesses, default=0):
            num_rows = -(-sum(num_guesses) // num_passes)
            kv_tokens = sum([chunk.start for chunk in drafted]) * num_rows // len(drafted)
            self._num_timed += 1
            self._passes.learn(Step(sequences=num_rows, kv_tokens=kv_tokens), result.draft_s / num_passes)

    def seconds(self, num_guesses: int, num_passes: int, kv_each: float) -> float:
        """Return how long so many guesses take, as many of them in one pass as in another."""
        num_rows = -(-num_guesses // num_passes)
        return num_passes * self._passes.costs.decode_s(num_rows, num_rows * kv_each)

    def most(self, sequence: Sequence, num_verified: int, token_s: float) -> int:
        """Return how many guesses of a sequence are of use once a step has verified so many; 0 or less: none are.

        token_s: a token's share of a step without guesses.
        """
        num_left = sequence.length_limit - len(sequence.tokens)
        if _lacking(sequence) * self._fed_s > _FED_SHARE * num_left * token_s:
            return 0
        return min(self._max_model_len - len(sequence.tokens), num_left) - 2 - num_verified

    def trial(self, most: Mapping[Sequence, int], row_s: float) -> Mapping[Sequence, int]:
        """Return how many guesses to try of sequences, of none of which they seem worth it.

        most: of each; row_s: what a step takes longer with a guess.
        """
        if self._num_timed >= ENOUGH_STEPS and self._for_trials_s <= 0 and not self._is_trying:
            return {}
        self._is_trying = True
        sequence = min(most, key=_lacking)
        count = min(_TRIED, most[sequence])
        if _lacking(sequence) <= _FED_AT_ONCE:
            self._for_trials_s -= count * row_s
        return {sequence: count}

    def ask(self, decoding: Seq[Sequence], wanted: Mapping[Sequence, int]) -> None:
        """Say how many guesses are wanted of sequences after their next step, and what is computed before them."""
        num_left = _FED_AT_ONCE
        for sequence in decoding:
            known, count = sequence.guessing, wanted.get(sequence, 0)
            lacking = _lacking(sequence)
            known.num_to_feed = min(lacking, num_left)
            known.num_to_draft = count if known.num_to_feed or not lacking else 0
            if count:
                num_left -= known.num_to_feed


def _lacking(sequence: Sequence) -> int:
    """Return how many of a sequence's tokens the draft model has not computed."""
    return max(0, len(sequence.tokens) - sequence.guessing.num_drafted)
