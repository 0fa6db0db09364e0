"""Whether a request may be what ended the workers it was placed on.

Invariant: a loss counts for as long as the request has gained no token since; it is evidence unless something else
than the worker's own work ended the process, or the process turned out to live.
"""

from math import inf

from pdserve.ids import Incarnation, WorkerId

Process = tuple[WorkerId, Incarnation]


class Losses:
    """The workers that were lost while they had one request, since it last gained a token."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._is_evidence: dict[Process, bool] = {}
        self.last_s = -inf

    @property
    def count(self) -> int:
        return len(self._is_evidence)

    @property
    def num_unexplained(self) -> int:
        return sum(self._is_evidence.values())

    def note(self, process: Process, num_tokens: int, now_s: float) -> None:
        """Note that a worker was lost when the request had that many tokens."""
        if num_tokens != self._num_tokens:
            self._is_evidence.clear()
        self._num_tokens = num_tokens
        self._is_evidence[process] = True
        self.last_s = now_s

    def explain(self, process: Process) -> None:
        """Note that the request did not end this process."""
        if process in self._is_evidence:
            self._is_evidence[process] = False

    def __str__(self) -> str:
        return " and ".join(worker_id for worker_id, _ in self._is_evidence)
