"""How long requests wait for workers while no pair of them can serve."""


class PoolGrace:
    """Each waits so long at most, and none where no worker has come, gone or loaded for that long."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._moved_s: float | None = None  # when a worker last did

    def note_change(self, now_s: float) -> None:
        """Note that a worker came, went, loads or drains: others may come."""
        self._moved_s = now_s

    def until_s(self, since_s: float, now_s: float) -> float:
        """Return until when a request waits that has found no pair since `since_s`; maybe a moment that has passed."""
        if self._moved_s is None:
            self._moved_s = now_s  # the first request, before any worker
        return min(self._moved_s, since_s) + self._grace_s
