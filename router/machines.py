"""Which workers of one machine compute at the same time, and will soon. Pure.

A worker is looked at whenever it or a neighbour reports a step or is given a request. Between looks it is taken to go
on as it was seen. How long it stays busy or idle is learnt, so that what is seen now is believed for about that long.
"""

from dataclasses import dataclass, field
from math import exp

from pdserve.router.events import LinkId
from pdserve.router.view import WorkerView

_LEARN = 0.1  # weight of the latest busy or idle period in the running means
_MOST = 16  # workers of a machine; of more, each step's cost would be a walk over all


@dataclass(slots=True)
class _Member:
    """One worker."""

    view: WorkerView
    seen_s: float
    is_busy: bool = False
    since_s: float = 0.0  # since when it is as it is
    busy_s: float = 0.0  # in all
    mean_s: dict[bool, float] = field(default_factory=dict)  # of periods, by whether busy
    mark: tuple[float, float] = (0.0, 0.0)  # when its step began, and how long the others had computed by then

    def look(self, now_s: float) -> bool:
        """Take in what it has done since; return whether it has begun to work."""
        self.busy_s += (now_s - self.seen_s) * self.is_busy
        self.seen_s = now_s
        if self.view.is_busy == self.is_busy:
            return False
        length_s = now_s - self.since_s
        before_s = self.mean_s.get(self.is_busy, length_s)
        self.mean_s[self.is_busy] = before_s + _LEARN * (length_s - before_s)
        self.is_busy, self.since_s = not self.is_busy, now_s
        return self.is_busy

    def expected(self, horizon_s: float) -> float:
        """Return the share of the time from now on that it will compute: busy and idle periods of random lengths."""
        busy_s, idle_s = self.mean_s.get(True), self.mean_s.get(False)
        if busy_s is None or idle_s is None:
            return float(self.is_busy)
        share = busy_s / max(1e-9, busy_s + idle_s)
        rest_s = max(1e-6, busy_s * idle_s / max(1e-9, busy_s + idle_s))  # until what is seen now is forgotten
        ratio = max(1e-6, horizon_s) / rest_s
        return share + (self.is_busy - share) * (1 - exp(-ratio)) / ratio


class Machines:
    """All workers whose machine is known, by machine."""

    def __init__(self) -> None:
        self._members: dict[str, dict[LinkId, _Member]] = {}

    def look(self, worker: WorkerView, now_s: float) -> None:
        """Look at a worker and its neighbours."""
        host = worker.registration.host
        if not host:
            return
        members = self._members.setdefault(host, {})
        if worker.link not in members and len(members) < _MOST:
            members[worker.link] = _Member(worker, now_s, since_s=now_s)
        begun = [link for link, member in members.items() if member.look(now_s)]
        for link in begun:
            members[link].mark = now_s, self._others_s(members, link)

    def end_step(self, worker: WorkerView, elapsed_s: float, now_s: float) -> float | None:
        """Return how many neighbours computed, on average, during the step that has just ended; None: nobody knows."""
        self.look(worker, now_s)
        members = self._members.get(worker.registration.host)
        member = None if members is None else members.get(worker.link)
        if members is None or member is None:
            return None
        others_s = self._others_s(members, worker.link)
        (began_s, before_s), member.mark = member.mark, (now_s, others_s)
        if 0 < now_s - began_s < 2 * elapsed_s + 0.02:
            return (others_s - before_s) / (now_s - began_s)
        return float(sum(other.is_busy for link, other in members.items() if link != worker.link))

    def expected(self, worker: WorkerView, horizon_s: float) -> float:
        """Return how many neighbours will compute, on average, for so long from now on."""
        members = self._members.get(worker.registration.host)
        if members is None:
            return 0.0
        return sum(other.expected(horizon_s) for link, other in members.items() if link != worker.link)

    def forget(self, worker: WorkerView) -> None:
        members = self._members.get(worker.registration.host, {})
        members.pop(worker.link, None)
        if not members:
            self._members.pop(worker.registration.host, None)

    @staticmethod
    def _others_s(members: dict[LinkId, _Member], link: LinkId) -> float:
        return sum(member.busy_s for other, member in members.items() if other != link)
