"""How evenly a mixture's tokens spread over its experts: of each layer, the busiest expert's tokens over the mean."""

from collections.abc import Sequence

from torch import Tensor

WINDOW = 1024  # tokens, at least: fewer leave most experts of a layer untouched, however even it is


class ExpertBalance:
    """Watches the counts that a mixture's layers keep: int64 [num_experts] each, of which steps add to theirs."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self._counts = counts
        self._before = [each.clone() for each in counts]
        self._num_tokens = 0

    def after(self, num_tokens: int) -> tuple[float, ...]:
        """Note a step of so many tokens; once in a window, return each layer's ratio since the last time."""
        self._num_tokens += num_tokens
        if self._num_tokens < WINDOW or not self._counts:
            return ()
        self._num_tokens = 0
        since = [now - before for now, before in zip(self._counts, self._before, strict=True)]
        for before, now in zip(self._before, self._counts, strict=True):
            before.copy_(now)
        return tuple([float(each.max()) * len(each) / float(each.sum()) for each in since if each.any()])
