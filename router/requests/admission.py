"""Which valid requests are admitted, which wait, and which are refused before they were ever placed.

Invariant: a request that waits is placed as soon as it can be, in its turn; it is refused as soon as it can no longer
meet its objectives, whatever keeps it from being placed; and at most MAX_OVERTAKEN later requests, for which there is
room where there is none for it, are placed before it.
"""

from bisect import insort
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from pdserve.base.ids import MAX_WORKER_TASKS, RequestId
from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.protocol.refusal import Cause, Refused
from pdserve.protocol.reports import Stage
from pdserve.router.config import Limits
from pdserve.router.placement.placements import Placements
from pdserve.router.placement.routing import Held, Placed
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.events import RequestArrived
from pdserve.router.requests.request import Counter, Request

MAX_TENANTS = 4096  # with a counter, besides those that wait
# Requests that may be placed before one for which there is no room. As many without room are tried at a time, and half
# as many of one tenant: then the next tenant's requests are tried.
MAX_OVERTAKEN = 8


class HoldQueue:
    """Requests that wait: highest priority first, then the tenant served least, then the least time left.

    When over its bound, the lowest class gives way, and in it the tenant with the most requests.

    Which tenant was served least is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language
    Models" (OSDI 2024): each served token is charged to its tenant, and among those that wait the one with the
    smallest counter is next. A tenant that had nothing waiting is lifted to the others' level when it comes again,
    so nobody saves up a claim while away; a counter is never lowered, so no debt is forgotten while its tenant is
    known.
    """

    def __init__(self, max_num_held: int) -> None:
        self._max_num_held = max_num_held
        self._classes: dict[int, dict[str, list[Request]]] = {}  # by priority, then by tenant, most pressing first
        self._held: dict[RequestId, Request] = {}
        self._num_held = Counts[bool]()  # by whether they need a decode worker
        self._counters: dict[str, Counter] = {}  # by tenant; one without stands at the level of the last one served
        self._last = Counter()  # of the tenant that was charged last

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held.values())

    @property
    def kinds(self) -> set[bool]:
        """Which requests wait: those that need a decode worker (True), those that do not (False), or both."""
        return {kind for kind, count in self._num_held.items() if count}

    def find(self, request_id: RequestId) -> Request | None:
        return self._held.get(request_id)

    def push(self, request: Request) -> None:
        tenants = self._classes.setdefault(request.priority, {})
        insort(tenants.setdefault(request.tenant, []), request, key=_rank)
        self._held[request.request_id] = request
        self._num_held[request.needs_decode] += 1

    def remove(self, request_id: RequestId) -> Request | None:
        request = self._held.pop(request_id, None)
        if request is not None:
            self._num_held[request.needs_decode] -= 1
            tenants = self._classes[request.priority]
            tenants[request.tenant].remove(request)
            if not tenants[request.tenant]:
                del tenants[request.tenant]
            if not tenants:
                del self._classes[request.priority]
        return request

    def crowd_out(self) -> Request | None:
        """Take out the request for which there is no room, if the queue is over its bound."""
        if len(self._held) <= self._max_num_held:
            return None
        lowest = self._classes[min(self._classes)]
        longest = max(lowest.values(), key=lambda requests: (len(requests), _rank(requests[-1])))
        return self.remove(longest[-1].request_id)

    def in_turn(self, lacks_workers: Callable[[Request], bool] = lambda _: False) -> Iterator[Request]:
        """Yield waiting requests in their order; one that the caller leaves in the queue is passed over.

        At most half of MAX_OVERTAKEN of one tenant are passed over. Between two yields the caller may remove the
        request that it was given, and no other. Requests that no pair of workers can serve (`lacks_workers`) are left
        out: they do not count as passed over.
        """
        for priority in sorted(self._classes, reverse=True):
            tenants = self._classes[priority]
            turns = [(_turn(requests[0]), tenant, 0, 0) for tenant, requests in tenants.items()]
            heapify(turns)
            while turns:
                _, tenant, place, num_passed = heappop(turns)
                request = tenants[tenant][place]
                is_tried = not lacks_workers(request)
                if is_tried:
                    yield request
                if request.request_id in self._held:
                    place, num_passed = place + 1, num_passed + is_tried
                requests = tenants.get(tenant, ())
                if place < len(requests) and num_passed < MAX_OVERTAKEN // 2:
                    heappush(turns, (_turn(requests[place]), tenant, place, num_passed))

    # ---- tenants

    def counter(self, tenant: str) -> Counter:
        """Return the counter of a tenant of which a request has come; lift it if no other one waits."""
        waiting = {each: requests[0].counter for one in self._classes.values() for each, requests in one.items()}
        counter = self._counters.get(tenant)
        if counter is None:
            if len(self._counters) >= MAX_TENANTS + len(waiting):
                self._forget_some(waiting)
            counter = self._counters[tenant] = Counter()
        if tenant not in waiting:
            level = min([other.served for other in waiting.values()], default=self._last.served)
            counter.served = max(counter.served, level)
        return counter

    def charge_prompt(self, request: Request) -> None:
        """Charge a request that is placed for its prompt; its answer is charged as it comes."""
        request.counter.served += 0 if request.is_preparation else request.num_tokens
        self._last = request.counter

    def _forget_some(self, waiting: dict[str, Counter]) -> None:
        """Keep those that wait and, of the rest, the half with the largest counters: the others would be lifted."""
        rest = [(tenant, counter) for tenant, counter in self._counters.items() if tenant not in waiting]
        rest.sort(key=lambda each: each[1].served, reverse=True)
        self._counters = waiting | dict(rest[: MAX_TENANTS // 2])


def _rank(request: Request) -> tuple[float, int]:
    """Return a key that sorts first what of one tenant has to be placed first."""
    return request.first_token_due_s, request.arrival


def _turn(request: Request) -> tuple[int, float, int]:
    """Return a key that sorts first what of one class has to be placed first."""
    return request.counter.served, *_rank(request)


SHUTTING_DOWN = Refused(Cause.SHUTTING_DOWN, "this router is shutting down")
_LOOK_AGAIN_S = 0.01
_PLACED = 2  # requests for each sequence that decode workers have room for: as many prompts come meanwhile


def _kept_busy(workers: list[WorkerView]) -> int:
    return sum([min(_PLACED * worker.registration.max_num_seqs, MAX_WORKER_TASKS) for worker in workers])


@value
class _Most:
    """How many requests may be placed at once."""

    decoding: int = 0  # that need a decode worker
    others: int = 0  # whose first token, or vector, ends them: these keep none of the former waiting
    together: int = 0


class Admission:
    """Admits what the policy finds a place for, up to a number of requests, and keeps the rest in a queue."""

    def __init__(self, placements: Placements, limits: Limits) -> None:
        self._placements = placements
        self._limits = limits
        self.held = HoldQueue(limits.max_num_held)
        self._num_arrived = 0
        self._look_again_s = inf  # before, only a request's end makes room for one that is held
        self._num_ended = 0  # when held requests were last looked at
        self._most = _Most()  # as last found
        self.is_closed = False  # requests that arrive are refused

    @property
    def due_s(self) -> float:
        """When held requests are to be looked at again, if no request ends before."""
        return self._look_again_s if self.held else inf

    def _full(self) -> set[bool]:
        """Return of which kinds of those that wait no more are placed."""
        return {kind for kind in self.held.kinds if self._is_full(kind)}

    def _is_full(self, needs_decode: bool) -> bool:
        """Whether no other such request is placed: as many are as set, or as the attached workers can use."""
        if self._reaches(needs_decode):
            limit = self._limits.max_num_requests
            self._most = self._useful() if limit is None else _Most(limit, limit, limit)
        return self._reaches(needs_decode)

    def _reaches(self, needs_decode: bool) -> bool:
        most = self._most.decoding if needs_decode else self._most.others
        return self._num_placed(needs_decode) >= most or self._placements.num_asked >= self._most.together

    def _num_placed(self, needs_decode: bool) -> int:
        num_decoding = self._placements.num_decoding
        return num_decoding if needs_decode else self._placements.num_asked - num_decoding

    def _useful(self) -> _Most:
        """Return how many requests keep the attached workers busy, and no worker refuses."""
        workers = self._placements.workers
        prefills, decodes = workers.routable(Role.PREFILL), workers.routable(Role.DECODE)
        together = MAX_WORKER_TASKS * len(prefills or decodes)
        if prefills and decodes:
            handed = [worker for worker in decodes if not worker.role.is_in(Role.PREFILL)]
            together += sum([worker.registration.max_num_seqs for worker in handed])
        return _Most(_kept_busy(decodes or prefills), _kept_busy(prefills or decodes), together)

    # ---- arrivals and ends

    def arrive(self, event: RequestArrived, now_s: float) -> Request | None:
        """Place, hold or refuse a request. Return one that has gained tokens from another router: it is admitted."""
        counter, hasher = self.held.counter(event.tenant), self._placements.predictor.prefixes.hasher
        request = Request(event, self._num_arrived, counter, hasher, now_s)
        self._num_arrived += 1
        self._placements.demand.count_arrival(request)
        if self.is_closed:
            self._placements.report_end(request, SHUTTING_DOWN)
            return None
        self._placements.set_alarm(request.deadline_s, request)
        if request.num_delivered or not request.running:
            request.is_admitted = True
            self._placements.enter(request)
            return request
        wait = self._try(request, now_s, may_place=not self.held)
        if wait is not None and request.is_preparation:  # nobody misses it: it never waits
            self._placements.report_end(request, wait.why)
        if wait is None or request.is_preparation:
            return None
        self.held.push(request)
        self._note(request, wait, now_s)
        if wait.why.cause is Cause.TURN:
            self._place_held(now_s)
        crowded_out = self.held.crowd_out()
        if crowded_out is not None:
            assert crowded_out.waits_for is not None
            text = f"{crowded_out.waits_for.message}; max_num_held: {self._limits.max_num_held} more wait"
            self._placements.report_end(crowded_out, Refused(Cause.TURN, text))
        return None

    def end_held(self, request_id: RequestId, why: Refused) -> None:
        request = self.held.remove(request_id)
        if request is not None:
            self._placements.report_end(request, why)

    def end_all(self) -> None:
        """End all requests that wait, for this router shuts down."""
        for request in tuple(self.held):
            self.end_held(request.request_id, SHUTTING_DOWN)

    # ---- those that wait

    def look_soon(self, now_s: float) -> None:
        """Note that workers have come, gone or changed, and some can serve."""
        self._look_again_s = now_s
        self._most = _Most()

    def place_more(self, now_s: float) -> None:
        """Place what waits, as far as it can be, if a request has ended or it is time to look again."""
        if now_s >= self._look_again_s or self._placements.num_ended != self._num_ended:
            self._place_held(now_s)

    def look_at(self, request: Request, now_s: float) -> None:
        """Refuse one request that waits if it can no longer meet its objectives."""
        request.look_at_s = inf
        wait = self._try(request, now_s, may_place=False)
        if wait is None:
            self.held.remove(request.request_id)
            return
        self._note(request, wait, now_s)
        if wait.why.cause is Cause.TURN:
            self._place_held(now_s)

    def _place_held(self, now_s: float) -> None:
        """Try waiting requests in turn. Those behind one without room may pass it, unless it was passed too often."""
        self._look_again_s = inf
        passed: list[Request] = []
        unserved: list[Request] = []  # no pair of workers is there
        num_tried, full = 0, self._full()

        def cannot(other: Request) -> bool:
            return other.needs_decode in full or (bool(unserved) and other.needs_decode)

        for request in self.held.in_turn(cannot) if full < self.held.kinds else ():
            wait = self._try(request, now_s, may_place=True)
            if wait is None:
                self.held.remove(request.request_id)
                for other in passed if request.is_admitted else ():
                    other.num_overtaken += 1
                full = self._full()
            else:
                self._note(request, wait, now_s)
                num_tried += 1
                if wait.lacks_workers:
                    unserved.append(request)
                elif wait.why.cause is not Cause.SLOTS:  # there is no room: others may take that which comes
                    passed.append(request)
            if (
                full >= self.held.kinds
                or num_tried == MAX_OVERTAKEN
                or any(other.num_overtaken >= MAX_OVERTAKEN for other in passed)
            ):
                break
        self._num_ended = self._placements.num_ended

    def _note(self, request: Request, wait: Held, now_s: float) -> None:
        """Note why a request waits, and look at it in time to refuse it."""
        request.waits_for = wait.why
        due_s = request.first_token_due_s
        at_s = max(now_s + 0.1 * _LOOK_AGAIN_S, min(wait.until_s, due_s if due_s > now_s else inf))
        if at_s < request.look_at_s:
            request.look_at_s = at_s
            self._placements.set_alarm(at_s, request)

    def _try(self, request: Request, now_s: float, *, may_place: bool) -> Held | None:
        """Place a request or end it as the policy says, or return why it has to wait."""
        match self._placements.decide(request, request.running, now_s):
            case Held() as held:
                if not held.lacks_workers:
                    self._look_again_s = min(self._look_again_s, now_s + _LOOK_AGAIN_S)
                return held
            case Refused() as why:
                self._placements.report_end(request, why)
            case Placed() as placed:
                late_s = request.first_token_due_s - (placed.ttft_s or 0.0)
                until_s = late_s if late_s > now_s else inf
                if self._is_full(request.needs_decode):
                    num_placed = self._num_placed(request.needs_decode)
                    why = Refused(Cause.SLOTS, f"max_num_requests: {num_placed} requests are placed already")
                    return Held(why, until_s)
                if not may_place:
                    return Held(Refused(Cause.TURN, f"{len(self.held)} requests wait before it"), until_s)
                self._place_first(request, placed, now_s)
        return None

    def _place_first(self, request: Request, placed: Placed, now_s: float) -> None:
        self.held.charge_prompt(request)
        request.is_admitted, request.waits_for = True, None
        request.timeline.reach(Stage.ADMITTED, now_s)
        self._placements.enter(request)
        self._placements.demand.count_placed(request, placed.cached_tokens)
        self._placements.place(request, request.running, placed, now_s)
