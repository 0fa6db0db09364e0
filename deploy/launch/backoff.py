"""How long to wait before a process that has died is started again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling delays; a process that ran for `healthy_s` starts again from the first."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 10.0

    def next_delay_s(self, previous_s: float | None, ran_s: float) -> float:
        """Return the delay after a run of `ran_s`, where `previous_s` was the one before that run, if any."""
        if previous_s is None or ran_s >= self.healthy_s:
            return self.first_s
        return min(2 * previous_s, self.longest_s)
