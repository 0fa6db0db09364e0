"""Turns counts of requests into a stream: how many come in a second, and how long they are. Pure."""

from collections.abc import Sequence
from math import exp, sqrt

from pdserve.base.values import value
from pdserve.protocol.reports import NUM_BANDS, Demand, middle_of

Lengths = tuple[tuple[float, float], ...]  # tokens, and the share of requests that have so many; rising

_MIDDLES = tuple(middle_of(band) for band in range(NUM_BANDS))
SURE = 1.645  # of the normal distribution: what is counted is above its lower bound with 95 %


@value
class Traffic:
    """Requests of one kind of mixture."""

    prompt_rate: float  # prompts a second, for the prefill pool
    answer_rate: float  # sequences a second, for the decode pool
    prompts: Lengths  # tokens to compute
    answers: Lengths
    cached_tokens: float = 0.0  # of a prompt, on average, that nobody computes
    decoded_tokens: float | None = None  # of a prompt that an answer follows, on average; None: one follows each

    @property
    def text(self) -> str:
        return (
            f"{self.prompt_rate:.2f} prompts/s of {mean(self.prompts):.0f} tokens, "
            f"{self.answer_rate:.2f} answers/s of {mean(self.answers):.0f}"
        )


def mean(lengths: Lengths) -> float:
    """Return the mean number of tokens; 0 without any."""
    return sum(tokens * share for tokens, share in lengths)


class DecayingCounts:
    """Counts of requests that decay: what came `fades_s` seconds ago weighs a third."""

    def __init__(self, fades_s: float) -> None:
        self.fades_s = fades_s
        self.seconds = 0.0  # in which they came, faded as the counts are
        self.num_requests = self._cached_tokens = 0.0
        self._num_pooled = self._num_answered = self._answered_tokens = 0.0  # requests for vectors; all others
        self._prompts, self._answers = [0.0] * NUM_BANDS, [0.0] * NUM_BANDS

    def add(self, demand: Demand, seconds: float) -> None:
        """Take in what came in some seconds."""
        kept = self.kept(seconds)
        self.seconds = self.seconds * kept + seconds
        self.num_requests = self.num_requests * kept + demand.num_requests
        self._cached_tokens = self._cached_tokens * kept + demand.cached_tokens
        self._num_pooled = self._num_pooled * kept + demand.num_pooled
        self._num_answered = self._num_answered * kept + demand.num_requests - demand.num_pooled
        self._answered_tokens = self._answered_tokens * kept + demand.prompt_tokens - demand.pooled_tokens
        self._prompts = [before * kept + count for before, count in zip(self._prompts, demand.prompts, strict=True)]
        self._answers = [before * kept + count for before, count in zip(self._answers, demand.answers, strict=True)]

    def kept(self, seconds: float) -> float:
        """Return what of a count is left after some seconds."""
        return exp(-seconds / self.fades_s)

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.num_requests / self.seconds if self.seconds else 0.0

    @property
    def answer_rate(self) -> float:
        """Requests a second that an answer follows: all but those for vectors."""
        return self._num_answered / self.seconds if self.seconds else 0.0

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens to compute."""
        return sum(count * tokens for count, tokens in zip(self._prompts, _MIDDLES, strict=True))

    def traffic(self) -> Traffic | None:
        """Return the stream; None before a request and an answer were counted."""
        prompts, answers = _lengths(self._prompts), _lengths(self._answers)
        if not answers and self._num_pooled and not self._num_answered:
            answers = ((1.0, 1.0),)  # of which none comes: vectors alone
        if not prompts or not answers:
            return None
        cached = self._cached_tokens / max(1.0, self.num_requests)
        decoded = self._answered_tokens / self._num_answered if self._num_pooled and self._num_answered else None
        return Traffic(self.rate, self.answer_rate, prompts, answers, cached, decoded)

    def sure_rates(self, mixture: Traffic) -> tuple[float, float]:
        """Return lower bounds, with 95 %, of the prompts (of the mixture's mean length) and sequences a second.

        Lengths of requests scatter too, so that few long ones are weaker evidence than many short ones.
        """
        if not self.num_requests or not self.seconds:
            return 0.0, 0.0
        squares = sum(count * tokens**2 for count, tokens in zip(self._prompts, _MIDDLES, strict=True))
        tokens = max(0.0, self.computed_tokens - SURE * sqrt(squares))
        requests = max(0.0, self._num_answered - SURE * sqrt(self._num_answered))
        each = mean(mixture.prompts)
        return tokens / each / self.seconds if each else 0.0, requests / self.seconds


def _lengths(counts: Sequence[float]) -> Lengths:
    total = sum(counts)
    if total <= 0:
        return ()
    return tuple(
        (tokens, count / total) for tokens, count in zip(_MIDDLES, counts, strict=True) if count > 1e-6 * total
    )
