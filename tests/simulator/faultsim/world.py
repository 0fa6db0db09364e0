"""The world that simulated processes share, its time, its chance and what is noted of it; and what each process is."""

import random
from math import inf
from typing import TYPE_CHECKING

from faultsim.story import Trace
from pdserve.base.clock import Action, VirtualClock
from pdserve.base.ids import Incarnation, RequestId

if TYPE_CHECKING:
    from faultsim.network import End


class ViolationError(Exception):
    """An invariant does not hold. Names what it is about, so that its story can be told."""

    def __init__(self, invariant: str, text: str, request_id: RequestId | None = None) -> None:
        super().__init__(f"{invariant}: {text}")
        self.request_id = request_id


class World:
    """Virtual time among processes that can freeze and die, one source of chance, one trace."""

    def __init__(self, seed: int, trace_length: int = 0) -> None:
        self.seed = seed
        self.trace = Trace(trace_length)
        self.rng = random.Random(seed)
        self.num_events = 0
        self.num_messages = 0  # from one process to another
        self.ended_s: dict[RequestId, float] = {}  # when a request's client had its end
        self.stop_within_s = inf  # how long after that a worker may still compute for it
        self._clock = VirtualClock()
        self.now_s = self._clock.now_s
        self.run = self._clock.run

    @property
    def now(self) -> float:
        return self.now_s()

    def after(self, delay_s: float, owner: "Process | None", action: Action, *args: object) -> None:
        """Let `owner` (None: nature) do something in a while: nothing once it is dead, and later while it is frozen."""
        self._clock.at(self.now_s() + delay_s, self._carry_out, owner, action, args)

    def at(self, at_s: float, owner: "Process | None", action: Action, *args: object) -> None:
        self._clock.at(at_s, self._carry_out, owner, action, args)

    def _carry_out(self, owner: "Process | None", action: Action, args: tuple[object, ...]) -> None:
        self.num_events += 1
        if owner is None:
            action(*args)
        elif owner.frozen:
            owner.deferred.append((action, args))
        elif owner.alive:
            action(*args)

    def note(self, who: str, what: object) -> None:
        self.trace.note(self.now, who, what)


class Process:
    def __init__(self, world: World, name: str, incarnation: Incarnation) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.frozen = False
        self.deferred: list[tuple[Action, tuple[object, ...]]] = []
        self.ends: dict[End, None] = {}
        self.num_freezes = 0
        self.thawed_s = 0.0
        self.started_s = world.now

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def crash(self) -> None:
        """End at once. Whatever this process was doing stops, and its streams break."""
        self.world.note(self.name, "crashed")
        self.alive = False
        self.frozen = False
        self.deferred.clear()
        for end in list(self.ends):
            end.die()

    def freeze(self) -> None:
        """Stop doing anything; what is asked for meanwhile is done on thawing."""
        self.world.note(self.name, "frozen")
        self.frozen = True
        self.num_freezes += 1

    def thaw(self) -> None:
        """Go on, first with what was asked for meanwhile."""
        if not self.frozen:
            return
        self.world.note(self.name, "thawed")
        self.frozen = False
        self.thawed_s = self.world.now
        deferred, self.deferred = self.deferred, []
        self.catch_up(deferred)

    def catch_up(self, missed: list[tuple[Action, tuple[object, ...]]]) -> None:
        """Do what should have been done before anything that waits now."""
        if self.frozen:
            self.deferred[:0] = missed
            return
        for action, args in missed:
            if self.alive:
                action(*args)

    def accept(self, end: "End") -> None:
        raise NotImplementedError(f"{self.name} is not dialled by {end}")
