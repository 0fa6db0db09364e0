"""Clients: what they ask for, and whether they get exactly that, once and in time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faultsim.engine import expected, expected_vector
from faultsim.registration import VOCAB_SIZE, Size
from faultsim.router import RouterProcess
from faultsim.world import ViolationError, World
from pdserve.base.ids import RequestId
from pdserve.engine.sequence import SEED_MASK, SEED_STRIDE
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.paging import PageShape
from pdserve.protocol.refusal import Refused, Status
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.requests.commands import Deliver, Finished
from pdserve.router.requests.events import ClientEvent, ClientGone, RequestArrived, StopStringFound
from pdserve.router.requests.timeline import Moved

GRACE_S = 1.0  # an answer's end may come this long after its deadline


@dataclass(frozen=True, slots=True)
class Wish:
    """What one client wants, and how it behaves."""

    request_id: RequestId
    at_s: float
    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: str
    priority: int
    deadline_s: float  # after at_s
    leaves_after_s: float | None = None
    leaves_at_first_token: bool = False
    stops_at: int | None = None  # tokens of a continuation after which a stop string is found
    adapter: AdapterDigest = NO_ADAPTER


class Answer:
    """One request as its client sees it."""

    def __init__(self, world: World, wish: Wish, size: Size, on_end: Callable[["Answer", str], object]) -> None:
        self.wish = wish
        self.outcome: str | None = None
        self.came_s: list[list[float]] = [[] for _ in range(wish.params.n)]  # each token of each continuation
        self.moves: tuple[Moved, ...] = ()
        self.router: RouterProcess | None = None
        self._world = world
        self._on_end = on_end
        self._has_left = False
        self._received: list[list[int]] = [[] for _ in range(wish.params.n)]
        self._ended = [False] * wish.params.n
        self._stopped = [False] * wish.params.n  # by a stop string; what is under way may still come
        self._size = size
        self._expected: list[list[int]] = []  # of each continuation, once a token has come

    def ask(self, router: RouterProcess | None) -> None:
        if router is None:
            self._finish("NO_ROUTER")
            return
        self.router = router
        wish, now = self.wish, self._world.now
        event = RequestArrived(
            request_id=wish.request_id,
            token_ids=wish.prompt,
            params=wish.params,
            received_s=now,
            deadline_s=now + wish.deadline_s,
            priority=wish.priority,
            tenant=wish.tenant,
            adapter=wish.adapter,
        )
        self._world.after(wish.deadline_s + GRACE_S, None, self._check_in_time)
        if wish.leaves_after_s is not None:
            self._world.after(wish.leaves_after_s, None, self.leave)
        router.admit(event, self)

    def leave(self) -> None:
        if self.outcome is None and not self._has_left and self.router is not None:
            self._has_left = True
            self._world.after(0.0, self.router, self.router.post, ClientGone(self.wish.request_id))

    def lose_router(self) -> None:
        if self.outcome is None:
            self._finish("ROUTER_LOST")

    def deliver(self, command: Deliver) -> ClientEvent | None:
        """Take tokens in, each checked against what any correct engine says."""
        self._world.num_messages += 1
        wish, index = self.wish, command.index
        if not self._expected:
            self._expected = [whole_answer(wish, number, self._size.others) for number in range(wish.params.n)]
        received, due, fresh = self._received[index], self._expected[index], command.token_ids
        start = len(received)
        received.extend(fresh)
        self.came_s[index] += [self._world.now] * len(fresh)
        if command.pooled != self._due_vector():
            raise self._violation("I3", f"the vector is {command.pooled!r}, due was {self._due_vector()!r}")
        if self.outcome is not None:
            raise self._violation("I4", f"tokens of {index} came after the end")
        if fresh != due[start : start + len(fresh)]:
            text = f"tokens {start}... of {index} are {fresh}, due were {due[start : len(received)]}"
            raise self._violation("I3", text)
        if self._stopped[index]:
            return None
        if command.finish_reason:
            if self._ended[index] or received != due:
                raise self._violation("I3", f"{index} ended after {len(received)} of {len(due)} tokens")
            self._ended[index] = True
        if wish.leaves_at_first_token:
            self.leave()
        if wish.stops_at is not None and len(received) >= wish.stops_at and not self._ended[index]:
            self._ended[index] = self._stopped[index] = True
            return StopStringFound(wish.request_id, index)
        return None

    def _due_vector(self) -> bytes:
        wish = self.wish
        if wish.params.pooling is None:
            return b""
        return expected_vector(wish.prompt, wish.params.pooling, self._size.others, wish.adapter)

    def end(self, outcome: Finished | Refused) -> None:
        if isinstance(outcome, Finished):
            if not all(self._ended):
                raise self._violation("I3", f"finished with continuations that have not: {self._ended}")
            self.moves = tuple(outcome.ledger.moves)
            self._finish("OK")
            return
        if outcome.status is Status.CANCELLED and not self._has_left:
            raise self._violation("I4", "cancelled, though its client waits")
        if outcome.status is Status.DEADLINE_EXCEEDED and self._world.now < self.wish.at_s + self.wish.deadline_s:
            raise self._violation("I4", "ended by a deadline that has not come")
        if outcome.status in (Status.INVALID_ARGUMENT, Status.NOT_FOUND):
            raise self._violation("I7", f"refused a good request: {outcome}")
        self._world.note("client", (self.wish.request_id, outcome))
        self._finish(outcome.status.value)

    def _finish(self, outcome: str) -> None:
        if self.outcome is not None:
            raise self._violation("I4", f"ended as {outcome} after {self.outcome}")
        self.outcome = outcome
        self._world.ended_s[self.wish.request_id] = self._world.now
        self._on_end(self, outcome)

    def _check_in_time(self) -> None:
        """Raise ViolationError where the deadline passed without an end, unless the router could not act."""
        router = self.router
        was_frozen = router is not None and (router.frozen or self._world.now - router.thawed_s < 2 * GRACE_S)
        if self.outcome is None and not was_frozen:
            raise self._violation("I4", f"no end {GRACE_S} s after its deadline")

    def _violation(self, invariant: str, text: str) -> ViolationError:
        return ViolationError(invariant, f"request {self.wish.request_id!r}: {text}", self.wish.request_id)


def whole_answer(wish: Wish, index: int, others: Sequence[PageShape]) -> list[int]:
    """Return all tokens of a continuation, up to the first one that stops it."""
    params = wish.params
    if params.pooling is not None:
        return []
    seed = (params.seed + index * SEED_STRIDE) & SEED_MASK
    tokens = expected(wish.prompt, seed, params.max_tokens, VOCAB_SIZE, others, wish.adapter)
    stops = (place for place, token in enumerate(tokens) if token in params.stop_token_ids)
    return tokens[: next(stops, len(tokens)) + 1]
