"""Speculative decoding: guesses of what sequences will sample, and how many of them a step verifies. Pure.

Invariant: guesses change when tokens come, and never which. The runner samples each token as it would without guesses.

A step with more rows takes longer. So the guesses verified in a step are those that make most of its time: the expected
tokens, over the seconds that the step is predicted to take with as many rows (goodput: Liu et al. 2024, TurboSpec).
Both are learnt: how often guesses are right, from each sequence and from all guesses after a match as long; what rows
cost, from the steps themselves. Where guesses pay nothing, none are verified, but now and then some to learn whether
they do.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from math import inf

from pdserve.engine.guesses import NgramIndex, NgramLookup, Trials
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Phase, StepPlan, StepResult, work_of
from pdserve.perfmodel.curve import Step
from pdserve.perfmodel.model import LearntCosts

_INDEXED_AT_ONCE = 8192  # positions between two steps; takes 3 ms
_KEPT_UNTRIED = 1 - 1 / 512  # weight of what is known of guesses, for each step in which none was worth a row
_WORTH = 1.02  # more tokens a second than without guesses: they also cost that the next step is planned ahead
_MOST_SLOWER = 1.25  # that a step may get by guesses, where sequences without any wait for it too
_OUTLIER = 3.0  # a step counts as at most this multiple of its prediction
_EXPLORED_EVERY = 128  # steps: then costs of more rows are learnt, whatever they are taken to be
_HALF = 0.5  # share of guesses that are right, before one was seen


class Speculation:
    """Guesses for the sequences of one worker, within a limit for each."""

    def __init__(self, num_tokens: int, lookup: NgramLookup | None) -> None:
        """num_tokens: most guesses that a step verifies for a sequence. lookup: None if the runner guesses."""
        self._num_tokens = num_tokens
        self._lookup = lookup
        self._costs = LearntCosts()
        self._by_match: dict[int, Trials] = {}  # by the length of the match
        self._num_left = _INDEXED_AT_ONCE
        self._seen: set[int] = set()  # sizes of steps in service, by powers of two
        self._num_chosen = 0

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Take in how long a step took; what a trial of the engine has shown comes first."""
        self._costs.observe(step, elapsed_s, 0.0)

    def learn(self, sequences: Seq[Sequence], plan: StepPlan, result: StepResult) -> None:
        """Take in how a step's guesses turned out, and its time. sequences: parallel to the plan's chunks."""
        if not self._num_tokens:
            return
        self._num_left = _INDEXED_AT_ONCE
        untried: dict[int, Trials] = {}
        for sequence, chunk, tokens in zip(sequences, plan.chunks, result.tokens, strict=True):
            if chunk.num_drafts and tokens:
                num_right = len(tokens[0]) - 1
                for trials in self._trials(sequence):
                    trials.note(num_right, ended_wrong=num_right < chunk.num_drafts)
            elif sequence.drafts and chunk.phase is Phase.DECODE:
                own, by_match = self._trials(sequence)
                untried |= {id(own): own, id(by_match): by_match}
        for trials in untried.values():
            trials.fade(_KEPT_UNTRIED)
        if not result.failed:
            self._learn_cost(work_of(plan, result), result.elapsed_s)

    def _learn_cost(self, step: Step, elapsed_s: float) -> None:
        """Take in a step in service. The first of a size is left out: programs are recorded, and memory is taken."""
        size = step.sequences.bit_length()
        if step.prefill_tokens or size in self._seen:
            self.observe(step, min(elapsed_s, _OUTLIER * self._costs.seconds(step)))
        self._seen.add(size)

    def guess(self, sequence: Sequence, given: tuple[int, ...], most: int) -> None:
        """Give a sequence at most so many guesses: those of the runner, or by lookup once its tokens are indexed."""
        most = max(0, min(most, self._num_tokens))
        sequence.drafts = given[:most]
        if self._lookup is None or not most:
            return
        guessing, tokens = sequence.guessing, sequence.tokens
        if guessing.index is None:
            guessing.index = NgramIndex(self._lookup)
        self._num_left -= guessing.index.extend(tokens, self._num_left)
        if guessing.index.num_indexed == len(tokens):
            match = guessing.index.find(tokens, most)
            guessing.num_matched, sequence.drafts = match.num_matched, match.guesses

    def counts(self, decoding: Seq[Sequence]) -> Mapping[Sequence, int]:
        """Return how many guesses of sequences the next step should verify; nothing of those without."""
        if not self._num_tokens:
            return {}
        gains: list[tuple[float, int]] = []  # of a guess, and whose it is
        for place, sequence in enumerate(decoding):
            if sequence.drafts:
                trials, by_match = self._trials(sequence)
                share = trials.share(by_match.share(_HALF))
                gains += [(share**number, place) for number in range(1, 1 + len(sequence.drafts))]
        if not gains:
            return {}
        gains.sort(reverse=True)  # those of one sequence stay in order: each gains less than the one before
        best = self._best(decoding, [gain for gain, _ in gains])
        self._num_chosen += 1
        turn, rest = divmod(self._num_chosen, _EXPLORED_EVERY)
        if not rest:
            best = min(len(gains), max(best, 1 + turn % self._num_tokens))
        return Counter([decoding[place] for _, place in gains[:best]])

    def _best(self, decoding: Seq[Sequence], gains: Seq[float]) -> int:
        """Return how many rows more than one a sequence gain most tokens a second. gains: of each row, falling."""
        num_rows, kv_tokens = len(decoding), sum([sequence.computed for sequence in decoding])
        kv_each, expected = kv_tokens / num_rows, float(num_rows)
        plain_s = self._costs.decode_s(num_rows, kv_tokens)
        best, most = 0, _WORTH * expected / plain_s
        longest_s = inf if all(sequence.drafts for sequence in decoding) else _MOST_SLOWER * plain_s
        for count, gain in enumerate(gains, 1):
            expected += gain
            if count & (count - 1) and count != len(gains) and count % 4:
                continue  # 1, 2, and multiples of 4: to predict a time takes longer than to add
            step_s = self._costs.decode_s(num_rows + count, kv_tokens + count * kv_each)
            if step_s <= longest_s and expected / step_s > most:
                best, most = count, expected / step_s
        return best

    def _trials(self, sequence: Sequence) -> tuple[Trials, Trials]:
        """Return those of a sequence, and of all guesses after a match as long."""
        return sequence.guessing.trials, self._by_match.setdefault(sequence.guessing.num_matched, Trials())
