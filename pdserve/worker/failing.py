"""How many of a worker's last steps failed. Decides; does no I/O."""

REMEMBERED_S = 30.0  # then a worker that nobody uses is tried again


class FailedSteps:
    """Counts steps in a row that brought no sequence anything."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s = 0.0

    def note(self, num_sequences: int, num_failed: int, now_s: float) -> bool:
        """Note a step; return whether all of its sequences failed."""
        all_failed = 0 < num_failed == num_sequences
        self._count = self.count(now_s) + 1 if all_failed else 0
        self._last_s = now_s
        return all_failed

    def count(self, now_s: float) -> int:
        return self._count if now_s - self._last_s < REMEMBERED_S else 0
