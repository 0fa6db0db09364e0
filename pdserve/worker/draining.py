"""Whether a worker takes nothing more, and why. Decides; does no I/O.

Invariant: a worker drains from when it is asked to, or from the first look at which more than `max_quarantined_share`
of its pages are quarantined. Only another process has those pages back: the end of this one is proof for all of them.
"""


class Draining:
    def __init__(self, max_quarantined_share: float) -> None:
        self._max_quarantined_share = max_quarantined_share
        self.is_on = False
        self.reason = ""  # if nobody asked for it

    def ask(self) -> None:
        self.is_on = True

    def look(self, num_quarantined: int, num_pages: int) -> bool:
        """Return whether the worker begins to drain because too few pages are left to be of use."""
        if self.is_on or num_quarantined <= self._max_quarantined_share * num_pages:
            return False
        self.is_on = True
        self.reason = f"{num_quarantined} of {num_pages} pages are quarantined"
        return True
