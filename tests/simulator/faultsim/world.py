"""The world that simulated processes share: its time, its chance, and what is noted of it."""

import random
from math import inf
from typing import Protocol

from faultsim.story import Trace
from pdserve.ids import RequestId
from pdserve.virtual_time import Action, VirtualClock


class ViolationError(Exception):
    """An invariant does not hold. Names what it is about, so that its story can be told."""

    def __init__(self, invariant: str, text: str, request_id: RequestId | None = None) -> None:
        super().__init__(f"{invariant}: {text}")
        self.request_id = request_id


class Owner(Protocol):
    """Who carries an action out: nobody once it is dead; later, when it is frozen."""

    alive: bool
    frozen: bool
    deferred: list[tuple[Action, tuple[object, ...]]]


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

    def after(self, delay_s: float, owner: Owner | None, action: Action, *args: object) -> None:
        """Let `owner` (None: nature) do something in a while."""
        self._clock.at(self.now_s() + delay_s, self._carry_out, owner, action, args)

    def at(self, at_s: float, owner: Owner | None, action: Action, *args: object) -> None:
        self._clock.at(at_s, self._carry_out, owner, action, args)

    def _carry_out(self, owner: Owner | None, action: Action, args: tuple[object, ...]) -> None:
        self.num_events += 1
        if owner is None:
            action(*args)
        elif owner.frozen:
            owner.deferred.append((action, args))
        elif owner.alive:
            action(*args)

    def note(self, who: str, what: object) -> None:
        self.trace.note(self.now, who, what)
