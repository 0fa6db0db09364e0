"""Speculative decoding: guesses of what sequences will sample, and how many of them a step verifies. Pure.

Invariant: guesses change when tokens come, and never which. The runner samples each token as it would without guesses.

A step with more rows takes longer. So the guesses verified in a step are those that make most of its time: the expected
tokens, over the seconds that the step is predicted to take with as many rows (goodput: Liu et al. 2024, TurboSpec).
Both are learnt: how often guesses are right, from each sequence and from all guesses after a match as long; what rows
cost, from the steps themselves. Where guesses pay nothing, none are verified, but now and then some to learn whether
they do.

A draft model also takes time, so its guesses are chosen before they are made, by the same rule with that time added;
once they are made, their cost is spent. A loaded worker drafts nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from math import inf
from operator import itemgetter

from pdserve.engine.draft_model import DraftModel
from pdserve.engine.guesses import NO_MATCH, DraftsBy, Guesser, NgramIndex, NgramLookup, Trials
from pdserve.engine.recent_answers import RecentAnswers
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult, work_of
from pdserve.engine.timed_steps import TimedSteps
from pdserve.perfmodel.curve import Step
from pdserve.protocol.drafts import DraftSource, Verified

_INDEXED_AT_ONCE = 8192  # positions between two steps; takes 3 ms
_ANSWERS_AT_ONCE = 16  # lookups in recent answers between two steps; takes a millisecond
_KEPT_UNTRIED = 1 - 1 / 512  # weight of what is known of guesses, for each step in which none was worth a row
_WORTH = 1.02  # more tokens a second than without guesses: they also cost that the next step is planned ahead
_MOST_SLOWER = 1.25  # that a step may get by guesses, where sequences without any wait for it too
_EXPLORED_EVERY = 128  # steps: then costs of more rows are learnt, whatever they are taken to be
_HALF = 0.5  # share of guesses that are right, before one was seen
_MOST_DRAFTED = 256  # guesses after a step: to choose among these takes a millisecond

_Gain = tuple[float, int, int]  # what a guess brings, whose it is, and which of these


class Speculation:
    """Guesses for the sequences of one worker, within a limit for each."""

    def __init__(self, num_tokens: int, guesser: Guesser | None) -> None:
        """num_tokens: most guesses that a step verifies for a sequence."""
        self.source = None if guesser is None else guesser.source  # SUFFIX: also the sequence itself
        self._num_tokens = num_tokens
        self._lookup = guesser if isinstance(guesser, NgramLookup) else None
        answers = None if self._lookup is None else self._lookup.answers
        self._answers = None if answers is None else RecentAnswers(answers)
        self._draft_model = DraftModel(guesser) if isinstance(guesser, DraftsBy) and num_tokens else None
        self._steps = TimedSteps()
        self._by_match: dict[tuple[DraftSource | None, int], Trials] = {}  # by where the match is, and its length
        self._num_left = _INDEXED_AT_ONCE
        self._num_lookups = _ANSWERS_AT_ONCE
        self._num_chosen = 0
        self._is_trying = False  # the next drafts are verified, whether or not they seem worth it

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Take in how long a step took; what a trial of the engine has shown comes first."""
        self._steps.costs.observe(step, elapsed_s, 0.0)

    def learn(self, sequences: Seq[Sequence], plan: StepPlan, result: StepResult) -> None:
        """Take in how a step's guesses turned out, and its time. sequences: parallel to the plan's chunks."""
        if not self._num_tokens:
            return
        self._num_left, self._num_lookups = _INDEXED_AT_ONCE, _ANSWERS_AT_ONCE
        if self._answers is not None:
            self._answers.index_one()
        untried: dict[int, Trials] = {}
        for sequence, chunk, tokens in zip(sequences, plan.chunks, result.tokens, strict=True):
            if chunk.num_drafts and tokens:  # also those that made it fail: they bring nothing, so fewer are tried
                num_right = len(tokens[0]) - 1
                for trials in self._trials(sequence):
                    trials.note(num_right, ended_wrong=num_right < chunk.num_drafts)
            elif sequence.drafts and chunk.phase is Phase.DECODE:
                own, by_match = self._trials(sequence)
                untried |= {id(own): own, id(by_match): by_match}
        for trials in untried.values():
            trials.fade(_KEPT_UNTRIED)
        work = work_of(plan, result)
        if not result.failed:
            self._steps.learn(work, result.elapsed_s - result.draft_s)
        if self._draft_model is not None:
            self._draft_model.learn(sequences, plan, result, self._num_saved(work, result.draft_s))

    def _num_saved(self, work: Step, draft_s: float) -> float:
        """Return how many steps guesses have saved, less what they and the draft model took, in steps' time."""
        num_plain = work.sequences - work.guesses
        if not num_plain:
            return 0.0
        plain_s = self._steps.costs.decode_s(num_plain, work.kv_tokens * num_plain / work.sequences)
        longer_s = self._steps.costs.decode_s(work.sequences, work.kv_tokens) - plain_s
        return work.kept_guesses / num_plain - (longer_s + draft_s) / plain_s

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
        is_indexed = guessing.index.num_indexed == len(tokens)
        match, source = guessing.index.find(tokens, most) if is_indexed else NO_MATCH, DraftSource.NGRAM
        if self._answers is not None and self._num_lookups:
            self._num_lookups -= 1
            other = self._answers.find(sequence.job.scope, tokens, most, match.num_matched)
            if other.guesses:
                match, source = other, DraftSource.SUFFIX
        guessing.num_matched, guessing.source, sequence.drafts = match.num_matched, source, match.guesses

    def verified(self, sequence: Sequence, chunk: Chunk, num_accepted: int) -> Verified | None:
        """Return how a chunk's guesses turned out, so many of which are the sequence's tokens; None: it had none."""
        if not chunk.num_drafts or self.source is None:
            return None
        return Verified(sequence.guessing.source or self.source, chunk.num_drafts, num_accepted)

    def remember(self, sequence: Sequence) -> None:
        """Take in a sequence that is not computed any more: others may go on as its answer did."""
        if self._answers is not None and sequence.num_output_tokens > 1:
            self._answers.remember(sequence.job.scope, sequence.tokens, sequence.job.num_prompt_tokens)

    def counts(self, decoding: Seq[Sequence]) -> Mapping[Sequence, int]:
        """Return how many guesses of sequences the next step should verify; nothing of those without."""
        if not self._num_tokens:
            return {}
        gains = self._gains(decoding, [len(sequence.drafts) for sequence in decoding])
        if not gains:
            return {}
        best = len(gains) if self._is_trying else self._best(decoding, gains)
        self._num_chosen += 1
        turn, rest = divmod(self._num_chosen, _EXPLORED_EVERY)
        if not rest:
            best = min(len(gains), max(best, 1 + turn % self._num_tokens))
        return _counted(decoding, gains[:best])

    @property
    def can_draft(self) -> bool:
        """Whether the runner has a draft model that may compute now."""
        return self._draft_model is not None and self._draft_model.can_compute

    def ask_for_drafts(self, decoding: Seq[Sequence], counts: Mapping[Sequence, int], room: int) -> None:
        """Say what a draft model computes after the next step. counts: what that verifies; room: for guesses of all."""
        if self._draft_model is None:
            return
        draft_model, self._is_trying = self._draft_model, False
        wanted, fed = dict[Sequence, int](), None
        if room > 0 and decoding and self.can_draft:
            plain_s = self._steps.costs.decode_s(len(decoding), sum([each.computed for each in decoding]))
            fed = draft_model.next_to_feed(decoding, plain_s)
            most = min(self._num_tokens, max(1, _MOST_DRAFTED // len(decoding)))
            own = [(sequence, counts.get(sequence, 0)) for sequence in decoding]
            if gains := self._gains(decoding, [min(most, draft_model.most(*each)) for each in own]):
                best = gains[: min(room, self._best(decoding, gains, draft_model))]
                self._is_trying = not best and fed is None
                if best or fed is None or fed[1]:
                    wanted = draft_model.choose(_counted(decoding, gains), _counted(decoding, best), self._is_trying)
        draft_model.ask(decoding, wanted, fed)

    def _gains(self, decoding: Seq[Sequence], most: Iterable[int]) -> list[_Gain]:
        """Return what each guess brings, of at most so many of each sequence: those that bring most first."""
        gains: list[_Gain] = []
        for place, (sequence, count) in enumerate(zip(decoding, most, strict=True)):
            if count > 0:
                trials, by_match = self._trials(sequence)
                share = trials.share(by_match.share(_HALF))
                gains += [(share**number, place, number) for number in range(1, 1 + count)]
        gains.sort(key=itemgetter(0), reverse=True)  # each gains less than the one before: they stay in order
        return gains

    def _best(self, decoding: Seq[Sequence], gains: Seq[_Gain], drafter: DraftModel | None = None) -> int:
        """Return how many of the guesses gain most tokens a second. drafter: what is yet to make them."""
        num_rows, kv_tokens = len(decoding), sum([sequence.computed for sequence in decoding])
        kv_each, expected, costs = kv_tokens / num_rows, float(num_rows), self._steps.costs
        plain_s = costs.decode_s(num_rows, kv_tokens)
        best, most, num_passes = 0, _WORTH * expected / plain_s, 0
        have_all = len({place for _, place, _ in gains}) == num_rows
        longest_s = inf if have_all else _MOST_SLOWER * plain_s
        for count, (gain, _, number) in enumerate(gains, 1):
            expected, num_passes = expected + gain, max(num_passes, number)
            if count & (count - 1) and count != len(gains) and count % 4:
                continue  # 1, 2, and multiples of 4: to predict a time takes longer than to add
            step_s = costs.decode_s(num_rows + count, kv_tokens + count * kv_each)
            if drafter is not None:
                step_s += drafter.seconds(count, num_passes, kv_each)
            if step_s <= longest_s and expected / step_s > most:
                best, most = count, expected / step_s
        return best

    def _trials(self, sequence: Sequence) -> tuple[Trials, Trials]:
        """Return those of a sequence, and of all guesses after a match as long."""
        guessing = sequence.guessing
        return guessing.trials, self._by_match.setdefault((guessing.source, guessing.num_matched), Trials())


def _counted(decoding: Seq[Sequence], gains: Seq[_Gain]) -> dict[Sequence, int]:
    return Counter([decoding[place] for _, place, _ in gains])
