"""Bugs on purpose in how workers take roles, and in the room that they keep for them."""

from collections.abc import Iterator
from unittest.mock import patch

from breaking import Original, breaks, mutation

from pdserve.engine.kvcache import Room
from pdserve.worker.admission import Roles
from pdserve.worker.messages import RoleGiven


@breaks(Roles, "give")
def follow_a_role_of_a_smaller_epoch(original: Original, self: Roles, given: RoleGiven) -> None:
    epoch, self.epoch, self._given = self.epoch, given.epoch - 1, None
    original(self, given)
    self.epoch = epoch


@mutation
def keep_no_room_for_the_longest_prompt() -> Iterator[object]:
    """Let prompts without a grant, and grants, take all pages: two mixed workers wait for each other."""
    with (
        patch.object(Room, "left", property(lambda self: self._pool.num_pages)),
        patch.object(Room, "for_grants", property(lambda self: self._pool.num_pages)) as patched,
    ):
        yield patched
