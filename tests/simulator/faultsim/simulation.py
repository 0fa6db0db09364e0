"""One seed from its first event to rest, with every invariant asserted on the way."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from faultsim.chaos import Chaos
from faultsim.clients import Answer, Wish
from faultsim.cluster import REAPED_S, START_S, Cluster
from faultsim.scenario import Scenario, draw
from faultsim.world import ViolationError, World
from pdserve.base.collector import garbage_left
from pdserve.kvtransfer.doors import HEARTBEAT_S
from pdserve.worker.admission import NUM_STILL_LOOKS

SERVE_S = 10.0  # what is left of 200 requests when faults have stopped, on workers of 32 pages
# After faults and arrivals all requests have ended: at the worst, some wait in vain for pages in quarantine, until
# their worker drains for that and is started again.
SETTLE_S = NUM_STILL_LOOKS * HEARTBEAT_S + REAPED_S + START_S + SERVE_S
LEASE_S = 5.0  # a decode worker's grant that was never placed is given back
FREE_S = 5.0  # and then, until every page is free
STOP_S = 0.1  # without faults, a worker hears of a request's end before that
LOOK_S = 0.25
TRACE_LENGTH = 20_000  # notes that a story is told from


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    num_events: int
    num_messages: int
    virtual_s: float
    ends: dict[str, int]
    fingerprint: int  # equal for equal runs
    violation: str = ""
    story: tuple[str, ...] = ()


class Simulation:
    """A world with a cluster, its clients and its misfortunes."""

    def __init__(self, scenario: Scenario, trace_length: int = 0) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, trace_length)
        self.cluster = Cluster(self.world, scenario)
        self.chaos = Chaos(self.cluster, scenario)
        self.ends: Counter[str] = Counter()
        self.answers: list[Answer] = []
        self._fingerprint = 0
        if not scenario.faults:
            self.world.stop_within_s = STOP_S
        for wish in scenario.wishes:
            self.world.at(wish.at_s, None, self._ask, wish)

    def run(self) -> None:
        """Run to rest; raises ViolationError."""
        world, scenario = self.world, self.scenario
        last_s = max(scenario.wishes[-1].at_s, scenario.span_s) + LOOK_S
        self._look_until(last_s, lambda: False)
        self.chaos.stop()
        self._look_until(world.now + SETTLE_S, self._all_ended)
        waiting = next((answer for answer in self.answers if answer.outcome is None), None)
        if waiting is not None:
            request_id = waiting.wish.request_id
            raise ViolationError("I4", f"{request_id!r} has no end {SETTLE_S:g} s after the last fault", request_id)
        self.cluster.end_doubtful()
        self._look_until(world.now + LEASE_S + FREE_S, self._at_rest)
        self._check_rest()
        if scenario.is_calm:
            self._check_calm()

    def _check_calm(self) -> None:
        """Raise ViolationError where anything but the plain way was taken."""
        num_replaced = sum(router.core.placements.num_replaced for router in self.cluster.routers.values())
        if num_replaced:
            raise ViolationError("I4", f"without any fault, {num_replaced} placements were made again")
        if set(self.ends) != {"OK"}:
            failed = next(answer for answer in self.answers if answer.outcome != "OK")
            text = f"without any fault, {failed.wish.request_id!r} ended as {failed.outcome}"
            raise ViolationError("I4", text, failed.wish.request_id)

    def _check_rest(self) -> None:
        """Raise ViolationError unless nothing is left of any request, and routers know the roles of all workers."""
        for process in self.cluster.processes():
            process.check_idle()
        self.cluster.check_roles()

    def _look_until(self, until_s: float, done: Callable[[], bool]) -> None:
        world = self.world
        while world.now < until_s and not done():
            world.run(min(world.now + LOOK_S, until_s))
            for process in self.cluster.processes():
                process.check()

    def _ask(self, wish: Wish) -> None:
        answer = Answer(self.world, wish, self.scenario.decode_size, self._ended)
        self.answers.append(answer)
        routers = [router for router in self.cluster.routers.values() if router.alive]
        answer.ask(self.world.rng.choice(routers) if routers else None)

    def _ended(self, answer: Answer, outcome: str) -> None:
        self.ends[outcome] += 1
        self._fingerprint = hash((self._fingerprint, answer.wish.at_s, self.world.now, self.world.num_events))

    @property
    def fingerprint(self) -> int:
        return self._fingerprint

    def _all_ended(self) -> bool:
        return all(answer.outcome is not None for answer in self.answers)

    def _at_rest(self) -> bool:
        try:
            self._check_rest()
        except ViolationError:
            return False
        return True


def simulate(seed: int, num_requests: int = 200) -> Outcome:
    """Run one seed. One that fails is run again, with a trace, to tell its story."""
    with garbage_left():
        scenario = draw(seed, num_requests)
        outcome = _outcome(Simulation(scenario))
        if not outcome.violation:
            return outcome
        again = _outcome(Simulation(scenario, TRACE_LENGTH))
        return replace(again, violation=outcome.violation)


def _outcome(simulation: Simulation) -> Outcome:
    violation: str = ""
    story: tuple[str, ...] = ()
    world = simulation.world
    try:
        simulation.run()
    except ViolationError as error:
        violation = str(error)
        story = tuple(world.trace.story(error.request_id))
    return Outcome(
        seed=simulation.scenario.seed,
        num_events=world.num_events,
        num_messages=world.num_messages,
        virtual_s=world.now,
        ends=dict(sorted(simulation.ends.items())),
        fingerprint=simulation.fingerprint,
        violation=violation,
        story=story,
    )
