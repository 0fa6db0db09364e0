"""The router's core with a hand on everything it hears."""

from dataclasses import dataclass, replace

from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.router.core import RouterCore
from pdserve.router.events import (
    AttemptFailed,
    CancelAttempt,
    Command,
    Deliver,
    End,
    Event,
    Failure,
    Finished,
    Limits,
    LinkId,
    Place,
    Refused,
    Registration,
    RequestArrived,
    Role,
    RungReached,
    StepReported,
    Tick,
    WorkerRegistered,
)
from pdserve.router.ladder import Rung
from pdserve.router.placement import round_robin
from pdserve.sampling import SamplingParams

LAYOUT = KvLayout("w", 1, 1, 8, 16, "float32")
STOP, LENGTH = 1, 2
PROMPT = (5, 6, 7)


@dataclass(frozen=True)
class Delta:
    request_id: bytes
    attempt: int
    index: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: int = 0
    logprobs: tuple[object, ...] = ()


class Driver:
    """A core with a hand on everything it hears."""

    def __init__(self, limits: Limits | None = None, *, in_turn: bool = False) -> None:
        limits = limits or Limits()
        self.core = RouterCore("m", limits, round_robin) if in_turn else RouterCore("m", limits)
        self.now_s = 100.0
        self.delivered: dict[tuple[RequestId, int], list[int]] = {}
        self.ends: dict[RequestId, Finished | Refused] = {}
        self.last: list[Command] = []
        self._num_links = 0
        self._num_requests = 0

    def post(self, event: Event) -> list[Command]:
        self.last = self.core.handle(event, self.now_s)
        for command in self.last:
            match command:
                case Deliver():
                    self.delivered.setdefault((command.request_id, command.index), []).extend(command.token_ids)
                case End():
                    assert command.request_id not in self.ends
                    self.ends[command.request_id] = command.outcome
        return self.last

    def attach(self, name: str, *, incarnation: int = 1, **changes: object) -> LinkId:
        self._num_links += 1
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        told = Registration(
            WorkerId(name), Incarnation(incarnation), role, 1, True, "m", LAYOUT, 100, 8, 1000, f"{name}:1"
        )
        self.post(WorkerRegistered(LinkId(self._num_links), replace(told, **changes)))  # type: ignore[arg-type]
        return LinkId(self._num_links)

    def pair(self) -> tuple[LinkId, LinkId]:
        return self.attach("p0"), self.attach("d0")

    def arrive(self, *, priority: int = 0, deadline_in_s: float = 60.0, **params: int) -> RequestId:
        self._num_requests += 1
        request_id = RequestId(self._num_requests.to_bytes(16))
        sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        deadline_s = self.now_s + deadline_in_s
        self.post(RequestArrived(request_id, PROMPT, sampling, self.now_s, deadline_s, priority, "salt"))
        return request_id

    def placed(self) -> Place:
        (place,) = self.placements()
        return place

    def placements(self) -> list[Place]:
        return [command for command in self.last if isinstance(command, Place)]

    def cancels(self) -> list[CancelAttempt]:
        return [command for command in self.last if isinstance(command, CancelAttempt)]

    def tokens(
        self, link: LinkId, request: RequestId, position: int, *ids: int, attempt: int = 0, index: int = 0, end: int = 0
    ) -> None:
        self.post(StepReported(link, [Delta(request, attempt, index, position, ids, end)]))

    def rung(
        self, link: LinkId, request: RequestId, rung: Rung, age_s: float = 0.0, attempt: int = 0, **figures: float
    ) -> None:
        event = RungReached(link, request, Attempt(attempt), rung, age_s)
        self.post(replace(event, **figures))  # type: ignore[arg-type]

    def fail(self, link: LinkId, request: RequestId, failure: Failure, attempt: int = 0) -> None:
        self.post(AttemptFailed(link, request, Attempt(attempt), failure, "no luck"))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.post(Tick())

    def refusal(self, request: RequestId) -> Refused:
        outcome = self.ends[request]
        assert isinstance(outcome, Refused)
        return outcome

    def answer(self, request: RequestId) -> Finished:
        outcome = self.ends[request]
        assert isinstance(outcome, Finished)
        self.core.check_idle()
        return outcome
