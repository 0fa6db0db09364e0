"""How much workers that share the CPUs of a machine slow each other down. Pure.

Predictions work without it: then what steps cost is what they cost on average, neighbours included. Workers on GPUs
name no machine, and are nobody's neighbours.

A worker is looked at whenever it or a neighbour reports a step or is given a request. Between looks it is taken to go
on as it was seen. How long it stays busy or idle is learnt, so that what is seen now is believed for about that long.
"""

from dataclasses import dataclass, field
from math import exp, log

from pdserve.roles import Role
from pdserve.router.events import LinkId
from pdserve.router.view import WorkerView

_MOST = 16  # workers of a machine; of more, each step's cost would be a walk over all
_PERIODS = 10  # busy or idle ones, in the running means of their lengths
_STEPS = 200  # in the running regression of slowdowns
_DOUBT = 0.01  # variance added: where the number of busy neighbours hardly changes, it tells nothing
_MOST_LOG = log(4.0)  # of a slowdown by one neighbour


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
        self.mean_s[self.is_busy] = before_s + (length_s - before_s) / _PERIODS
        self.is_busy, self.since_s = not self.is_busy, now_s
        return self.is_busy

    def expected(self, horizon_s: float) -> float:
        """Return the share of the time from now on that it will compute: busy and idle periods of random lengths."""
        busy_s, idle_s = self.mean_s.get(True), self.mean_s.get(False)
        if busy_s is None or idle_s is None:
            return float(self.is_busy)
        cycle_s = max(1e-9, busy_s + idle_s)
        share = busy_s / cycle_s
        ratio = max(1e-6, horizon_s) / max(1e-6, busy_s * idle_s / cycle_s)  # until what is seen now is forgotten
        return share + (self.is_busy - share) * (1 - exp(-ratio)) / ratio


class Slowdown:
    """The slowdown by each busy neighbour: a regression of log(observed / predicted) on how many there were.

    What does not depend on that number is left to the curve that predicts.
    """

    def __init__(self) -> None:
        self.log_each = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # fading sums

    @property
    def each(self) -> float:
        """The factor for one neighbour that computes all the time."""
        return exp(self.log_each)

    def observe(self, busy: float, ratio: float) -> None:
        """Take in a step that took `ratio` of what is predicted for a worker alone, beside so many busy ones."""
        y, keep = min(2.0, max(-2.0, log(ratio))), 1 - 1 / _STEPS
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + busy
        self._y = keep * self._y + y
        self._xx = keep * self._xx + busy * busy
        self._xy = keep * self._xy + busy * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        covariance = self._xy / self._weight - mean_x * mean_y
        variance = self._xx / self._weight - mean_x * mean_x
        self.log_each = min(_MOST_LOG, max(0.0, covariance / (variance + _DOUBT)))


class Neighbours:
    """All workers whose machine is known, by machine."""

    def __init__(self) -> None:
        self._members: dict[str, dict[LinkId, _Member]] = {}
        self._slowdowns = {(role, prefills): Slowdown() for role in Role for prefills in (True, False)}

    def learnt(self, role: Role, *, prefills: bool) -> Slowdown:
        """Return what was learnt of one kind of steps of a role's workers."""
        return self._slowdowns[role, prefills]

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
            members[link].mark = now_s, _others_s(members, link)

    def alone_s(self, worker: WorkerView, times_s: tuple[float, float], now_s: float, *, prefills: bool) -> float:
        """Return what a step that has just ended would have taken alone; learn from what it took beyond that.

        `times_s`: as predicted for a worker alone, and as observed.
        """
        predicted_s, elapsed_s = times_s
        busy = self.busy_during(worker, elapsed_s, now_s)
        if busy is None:
            return elapsed_s
        slowdown = self._slowdowns[worker.role, prefills]
        if predicted_s > 0 and elapsed_s > 0:
            slowdown.observe(busy, elapsed_s / predicted_s)
        return elapsed_s / exp(slowdown.log_each * busy)

    def busy_during(self, worker: WorkerView, elapsed_s: float, now_s: float) -> float | None:
        """Return how many neighbours computed, on average, during the step that has just ended; None: nobody knows."""
        self.look(worker, now_s)
        members = self._members.get(worker.registration.host, {})
        member = members.get(worker.link)
        if member is None:
            return None
        others_s = _others_s(members, worker.link)
        (began_s, before_s), member.mark = member.mark, (now_s, others_s)
        if 0 < now_s - began_s < 2 * elapsed_s + 0.02:
            return (others_s - before_s) / (now_s - began_s)
        return float(sum(other.is_busy for link, other in members.items() if link != worker.link))

    def slowdown(self, worker: WorkerView, horizon_s: float, *, prefills: bool) -> float:
        """Return the mean factor of steps from now on, for so long."""
        each = self._slowdowns[worker.role, prefills].each - 1
        factor = 1.0
        for link, other in self._members.get(worker.registration.host, {}).items() if each else ():
            if link != worker.link:
                factor *= 1 + each * other.expected(horizon_s)
        return factor

    def forget(self, worker: WorkerView) -> None:
        members = self._members.get(worker.registration.host, {})
        members.pop(worker.link, None)
        if not members:
            self._members.pop(worker.registration.host, None)


def _others_s(members: dict[LinkId, _Member], link: LinkId) -> float:
    return sum(member.busy_s for other, member in members.items() if other != link)
