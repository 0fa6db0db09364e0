"""What every simulated process is: something that can crash, freeze and thaw, with streams to others."""

from typing import TYPE_CHECKING

from faultsim.world import World
from pdserve.ids import Incarnation
from pdserve.virtual_time import Action

if TYPE_CHECKING:
    from faultsim.network import End


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
