"""A request of a frontend that has not ended, and what its client has of the answer."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve.protocol.refusal import Refused
from pdserve.protocol.token_ids import to_wire
from pdserve.router.dispatcher import Answer
from pdserve.router.frontend import channel as messages
from pdserve.router.requests.events import RequestArrived, Resumed

if TYPE_CHECKING:
    from pdserve.router.frontend.routers import RouterLink


@dataclass(slots=True, eq=False)
class Underway:
    """The request, where it is, and what has been delivered."""

    event: RequestArrived
    answer: Answer
    token_ids: list[list[int]]  # by continuation
    ended: set[int]
    num_scored: int = 1
    first_token_s: float | None = None
    link: "RouterLink | None" = None  # None: it waits for a router
    num_lost: int = 0  # routers that had it
    is_over: Refused | None = None  # it was cancelled, and its router is to end it

    def arrival(self, now_s: float) -> messages.Arrive:
        """Return the request as a router takes it: with times that count from now."""
        event, resumed = self.event, None
        if self.num_lost:
            first_s = None if self.first_token_s is None else self.first_token_s - now_s
            resumed = Resumed(self.num_lost, self.token_ids, sorted(self.ended), self.num_scored, first_s)
        received_s, deadline_s = event.received_s - now_s, event.deadline_s - now_s
        sent = replace(event, token_ids=(), resumed=resumed, received_s=received_s, deadline_s=deadline_s)
        return messages.Arrive(sent, to_wire(event.token_ids))
