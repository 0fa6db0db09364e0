"""How long answers get. Pure.

Two guesses compete: the mean of the answers so far, and the mean share of what requests allowed. Where clients ask for
what they need, the second is right; where they ask for more than they need, the first. Whichever was nearer lately is
believed.
"""

_LEARN = 0.02  # weight of the latest answer in running means
_START_TOKENS = 128.0


class AnswerLengths:
    """Learns from answers, guesses the next one."""

    def __init__(self) -> None:
        self.mean_tokens = _START_TOKENS
        self._share = 1.0
        self._errors = [0.0, 0.0]  # running means of |guess - tokens|: by the mean, by the share
        self._overdue_tokens, self._num_reached = _START_TOKENS, 0

    def observe(self, num_tokens: int, max_tokens: int) -> None:
        """Take in an answer, and what its request allowed."""
        excess = num_tokens - self.expected(max_tokens)
        if excess >= 0:
            self._num_reached += 1
            self._overdue_tokens += max(_LEARN, 1 / self._num_reached) * (excess - self._overdue_tokens)
        for number, guess in enumerate(self._guesses(max_tokens)):
            self._errors[number] += _LEARN * (abs(guess - num_tokens) - self._errors[number])
        self.mean_tokens += _LEARN * (num_tokens - self.mean_tokens)
        self._share += _LEARN * (num_tokens / max(1, max_tokens) - self._share)

    @property
    def follow_limits(self) -> bool:
        """Whether what a request allows tells more than what others took: then it is known when an answer will end."""
        return self._errors[1] < self._errors[0]

    def expected(self, max_tokens: int) -> float:
        """Return how many tokens an answer will probably have."""
        by_mean, by_share = self._guesses(max_tokens)
        return by_share if self.follow_limits else by_mean

    @property
    def overdue_tokens(self) -> float:
        """Mean number of tokens still to come of an answer that has as many as were expected: the mean residual life.

        At least the token that is being computed.
        """
        return max(1.0, self._overdue_tokens)

    def _guesses(self, max_tokens: int) -> tuple[float, float]:
        return min(self.mean_tokens, max_tokens), self._share * max_tokens
