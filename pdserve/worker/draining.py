"""Whether a worker takes nothing more, and why. Decides; does no I/O.

Invariant: a worker drains from when it is asked to, or once more than `max_quarantined_share` of its pages have been
quarantined at NUM_LOOKS looks in a row. The next process has all of its pages free, since the end of this one ends what
kept them in quarantine. After a burst of cancels, peers that live give most pages back within a moment.
"""

NUM_LOOKS = 8  # at one each half second, as long as a router's patience with a silent worker


class Draining:
    def __init__(self, max_quarantined_share: float) -> None:
        self._max_quarantined_share = max_quarantined_share
        self.is_on = False
        self.reason = ""  # if nobody asked for it
        self._num_above = 0  # looks in a row

    def ask(self) -> None:
        self.is_on = True

    def look(self, num_quarantined: int, num_pages: int) -> bool:
        """Return whether the worker begins to drain because too few pages are left to be of use."""
        is_above = num_quarantined > self._max_quarantined_share * num_pages
        self._num_above = self._num_above + 1 if is_above else 0
        if self.is_on or self._num_above < NUM_LOOKS:
            return False
        self.is_on = True
        self.reason = f"{num_quarantined} of {num_pages} pages are quarantined"
        return True
