"""How long requests wait for workers while no pair of them can serve."""


class PoolGrace:
    """Runs from the moment when the last pair was lost; before there ever was one, from the first request on."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since_s: float | None = None

    def note(self, now_s: float, *, has_pair: bool) -> None:
        """Note whether some pair of workers could serve a request now."""
        if has_pair:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def until_s(self, now_s: float) -> float:
        """Return until when a request waits that finds no pair; a moment that has passed: it is refused."""
        if self._since_s is None:
            self._since_s = now_s
        return self._since_s + self._grace_s
