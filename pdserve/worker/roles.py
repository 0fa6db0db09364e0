"""A worker's role, and when it takes another one. Decides; does no I/O.

Invariant: the epoch of the role only grows; and a worker takes a role whose prompts are handed off only while there is
the room that these need (`engine.room`).
"""

from collections.abc import Mapping

from pdserve.engine.room import Room
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import ProtocolError, Refusal
from pdserve.roles import Role, lacks_pages
from pdserve.worker.messages import Placed, RoleGiven, RoleTaken


class Roles:
    """What routers place on this worker, and how many tokens a step computes at most."""

    def __init__(self, role: Role, scheduler: Scheduler, room: Room, step_tokens: Mapping[Role, int]) -> None:
        """`step_tokens`: of a step in each role; where it says nothing, the engine's limit."""
        self._scheduler = scheduler
        self._room = room
        self._step_tokens = step_tokens
        scheduler.step_tokens_beside = min(step_tokens.values(), default=scheduler.limits.max_num_batched_tokens)
        self._given: RoleGiven | None = None  # to be taken once there is room
        self.role, self.epoch = role, 0
        self._take(role)

    def num_kept(self, num_awaited: int) -> int:
        """Return how many pages prompts to hand off leave to grants, beside the room for the longest prompt.

        `num_awaited`: pages that hand-offs wait for, which arrive here.
        """
        return max(0, self._room.longest - self._room.num_granted) if self.role is Role.MIXED else num_awaited

    def give(self, given: RoleGiven) -> None:
        """Note the role that a router gives; ProtocolError where this worker cannot take it.

        An epoch that is not greater is late news, or another router's was first.
        """
        newest = self.epoch if self._given is None else self._given.epoch
        if given.epoch <= newest:
            return
        if why := lacks_pages(given.role, self._scheduler.cache.pool.num_pages, self._room.longest):
            raise ProtocolError(f"set_role.role: {why}", Refusal.ORDER)
        self._given = given
        if given.role.is_in(Role.PREFILL):
            self._room.is_kept_by_role = True  # grants leave it from now on

    def settle(self) -> list[RoleTaken]:
        """Take the role that was given, once it can be taken; return what is to be reported then."""
        given = self._given
        if given is None or (given.role.is_in(Role.PREFILL) and self._room.left < 0):
            return []
        self._given = None
        self.role, self.epoch = given.role, given.epoch
        self._take(given.role)
        return [RoleTaken(given.role, given.epoch, self._scheduler.step_tokens)]

    def refusal(self, placed: Placed, num_awaited: int) -> str:
        """Return why a job of another role finds no room, or nothing. `num_awaited`: pages that hand-offs wait for."""
        if placed.target is not None and self.role is Role.DECODE and self._room.left < 0:
            return "it decodes, and has no room for prompts to hand off"
        num_pages = self._scheduler.cache.num_pages(len(placed.job.token_ids) + placed.extra_tokens)
        room = self._room.left + self._room.num_granted - num_awaited  # what is granted lands
        if placed.source is not None and self.role is Role.PREFILL and num_pages > room:
            return "it computes prompts, and has no room for those of others"
        return ""

    def _take(self, role: Role) -> None:
        self._room.is_kept_by_role = role.is_in(Role.PREFILL)
        limit = self._scheduler.limits.max_num_batched_tokens
        self._scheduler.step_tokens = self._step_tokens.get(role, limit)
