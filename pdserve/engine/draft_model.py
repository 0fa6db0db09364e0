"""What a runner's draft model has computed of sequences, what it costs, and what it is asked for next. Pure.

Invariant: the draft model has computed KV of the first `num_drafted` tokens of a decoding sequence. If others overwrite
that KV, guesses get worse; tokens do not change.

All of its time is paid from one account, which gets a hundredth of the time of all steps, and the time that right
guesses save. While the account is empty, the draft model computes nothing. So a worker whose guesses do not pay, or
whose prompts cost more to compute again than guesses save, loses about a hundredth of its time.
What a head takes in (`Drafter.take_in`) is beside that. It is not paid, and has the step's bound: one pass of one layer
over the tokens that the step has computed.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from pdserve.engine.guesses import DraftsBy
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult
from pdserve.engine.timed_steps import TimedSteps
from pdserve.perfmodel.curve import Step
from pdserve.perfmodel.model import LATEST

FEW = 4  # tokens that a sequence may lack to be guessed for: the pass of its first guess computes them as well
FED_AT_ONCE = 128  # tokens of a prompt that the draft model computes after one step
_FED_AT_LEAST = 16  # the same at least: a pass with fewer takes nearly as long
_FED_FOR_ONE = 8  # tokens that it computes at most for each of the answer's: those so far, and those that may come
_MOST_SLOWER = 0.25  # of a step's time: that others wait for a prompt after it
_UNTIMED = 2  # times that this takes longer: programs are recorded, and memory is taken
_OUTLIER = 3.0  # a token counts as at most this multiple of what it is taken to take
_TRIED = 4  # guesses at once
_MOST_TRIED = 32  # times in a row
_SHARE = 0.01  # of the time of all steps
_MOST_SAVED = 50.0  # steps' time in the account; as much debt is remembered


class DraftModel:
    """The draft model of one worker, as its scheduler knows it."""

    def __init__(self, of: DraftsBy) -> None:
        self._max_model_len = of.max_model_len
        self._keeps_up = of.keeps_up  # so it lacks no tokens
        self._passes = TimedSteps()
        self._fed_s = 0.0  # that a token of a prompt takes, with its part of a pass; 0: none was computed yet
        self._num_fed = 0  # times
        self._waited_s = 0.0  # for which others would have waited while no prompt was computed
        self._account = _MOST_SAVED
        self._is_resting = False
        self._num_tried = 0  # times since guesses paid
        self.has_failed = False

    @property
    def can_compute(self) -> bool:
        return not self._is_resting and not self.has_failed

    def learn(self, sequences: Seq[Sequence], plan: StepPlan, result: StepResult, num_saved: float) -> None:
        """Take in what has been drafted after a step. sequences: parallel to the plan's chunks.

        num_saved: steps that guesses have saved, less what they and the draft model took, in steps' time.
        """
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
        if drafted:
            self._learn_cost(drafted, result)
        self._account = max(-_MOST_SAVED, min(_MOST_SAVED, self._account + _SHARE + num_saved))
        if self._account <= 0 or self._num_tried >= _MOST_TRIED:
            self._is_resting, self._num_tried = True, 0
            self._account = min(0.0, self._account)
        elif self._account == _MOST_SAVED:
            self._is_resting = False

    def _learn_cost(self, drafted: Seq[Chunk], result: StepResult) -> None:
        """Take in what passes took. The first of them computes parts of prompts as well."""
        num_fed = sum([len(chunk.draft.token_ids) for chunk in drafted if chunk.draft is not None])
        num_guesses = [len(guesses) for guesses in result.drafts.values()]
        num_passes = max(num_guesses)
        num_rows = -(-sum(num_guesses) // max(1, num_passes))
        kv_tokens = sum([chunk.start for chunk in drafted]) * num_rows // len(drafted)
        if num_fed > FEW:
            rest_s = max(0, num_passes - 1) * self._passes.costs.decode_s(num_rows, kv_tokens)
            fed_s = max(0.0, result.draft_s - rest_s) / num_fed
            self._num_fed += 1
            if self._fed_s:
                self._fed_s += LATEST * (min(fed_s, _OUTLIER * self._fed_s) - self._fed_s)
            elif self._num_fed > _UNTIMED:
                self._fed_s = fed_s
        elif num_passes:
            self._passes.learn(Step(sequences=num_rows, kv_tokens=kv_tokens), result.draft_s / num_passes)

    def seconds(self, num_guesses: int, num_passes: int, kv_each: float) -> float:
        """Return how long so many guesses take, as many of them in one pass as in another."""
        num_rows = -(-num_guesses // num_passes)
        return num_passes * self._passes.costs.decode_s(num_rows, num_rows * kv_each)

    def most(self, sequence: Sequence, num_verified: int) -> int:
        """Return how many guesses of a sequence can be made once a step has verified so many; 0 or less: none."""
        return self._num_left(sequence) - num_verified if self._lacking(sequence) <= FEW else 0

    def next_to_feed(self, decoding: Seq[Sequence], plain_s: float) -> tuple[Sequence, int] | None:
        """Return how many tokens of which sequence to compute after the next step: of the one that lacks least.

        An answer is taken to go on for as long as it has so far, at most. Others wait for a quarter of the time on
        average: 0 tokens while that is too little for a few. plain_s: what the step takes alone.
        """
        left, lacking = self._num_left, self._lacking
        due = [s for s in decoding if FEW < lacking(s) <= _FED_FOR_ONE * min(s.num_output_tokens, left(s))]
        if not due:
            return None
        self._waited_s += _MOST_SLOWER * plain_s
        most_s = self._account * plain_s if len(decoding) == 1 else self._waited_s
        count = min(FED_AT_ONCE, int(most_s / self._fed_s)) if self._fed_s else _FED_AT_LEAST
        if count < _FED_AT_LEAST:
            return due[0], 0
        self._waited_s = 0.0
        return min(due, key=lacking), count

    def choose(
        self, most: Mapping[Sequence, int], best: Mapping[Sequence, int], is_trying: bool
    ) -> dict[Sequence, int]:
        """Return how many guesses to make of sequences: at least one of each that lacks few tokens.

        One pass computes these together, and no sequence falls behind. most: that can be made; best: as many as pay;
        is_trying: a few are tried, since none pay.
        """
        chosen = dict(best) if self._keeps_up else {sequence: max(1, best.get(sequence, 0)) for sequence in most}
        self._num_tried = self._num_tried + is_trying if not best else 0
        if is_trying:
            sequence = min(most, key=self._lacking)
            chosen[sequence] = min(_TRIED, most[sequence])
        return chosen

    def ask(self, decoding: Seq[Sequence], wanted: Mapping[Sequence, int], fed: tuple[Sequence, int] | None) -> None:
        """Say how many guesses are wanted of sequences after their next step, and how much of which prompt is fed."""
        for sequence in decoding:
            known = sequence.guessing
            known.num_to_feed, known.num_to_draft = self._lacking(sequence), wanted.get(sequence, 0)
        if fed is not None and fed[1]:
            fed[0].guessing.num_to_feed, fed[0].guessing.num_to_draft = fed[1], 1

    def _num_left(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence can be guessed after its next step."""
        return min(self._max_model_len, sequence.length_limit) - len(sequence.tokens) - 2

    def _lacking(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens the draft model has not computed."""
        return 0 if self._keeps_up else max(0, len(sequence.tokens) - sequence.guessing.num_drafted)
