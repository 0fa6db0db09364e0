"""What a frontend needs from the router's core, which is in the same process or in another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.base.clock import Clock
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import RequestId
from pdserve.base.values import value
from pdserve.net.credentials import Connections
from pdserve.observe.metrics import RESPONSES_FORGOTTEN, RESPONSES_IN_BACKGROUND, Sample
from pdserve.protocol.adapters import AdapterDigest
from pdserve.protocol.refusal import Refused, Status
from pdserve.router.dispatcher import Answer
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.events import RequestArrived

State = dict[str, dict[str, Any]]  # of the live page: sections of entries by name
PERIOD_S = 0.25  # between two states of the live page
MAX_OF_STAGE = 16  # requests under way that the page shows of each stage
Abort = Callable[[str, Sequence[str]], None]  # a tenant, and the names that it gave its requests


@value
class Readiness:
    """Whether a router serves, as probes and clients ask."""

    is_live: bool  # it is not draining
    is_ready: bool  # some pair of workers serves, or did lately
    can_serve: bool  # some pair of workers serves
    max_model_len: int | None  # that all workers can hold; None: unknown
    adapters: Mapping[str, AdapterDigest] = field(default_factory=dict)  # that workers have loaded, by name
    model: str = ""  # the router's, by its name

    def check_model(self, wanted: str) -> None:
        """Raise ProtocolError for a router of another model; any will do if the wanted one's name is empty."""
        if wanted and self.model != wanted:
            raise ProtocolError(f"it serves the model {self.model!r}, and not {wanted!r}")


@value
class Span:
    """A part of requests' lives, over those that have ended since the router started."""

    count: int
    total_s: float


NONE = Span(0, 0.0)


@value
class EngineState:
    """The workers of a router as one engine."""

    is_ready: bool  # some pair of workers could serve a request now
    num_running: int
    num_waiting: int
    num_tokens: int  # in pages that are in use on decode workers
    max_num_tokens: int  # that these have pages for
    max_num_seqs: int  # that these run at once
    answered: Span = NONE  # requests, from their arrival to their end
    queued: Span = NONE  # the part before their prompts began
    computed: Span = NONE  # the part after that
    num_failed: int = 0  # requests that ended without their answer, invalid ones among them


@dataclass(slots=True)
class KeptCounts:
    """What became of the responses that this process keeps."""

    num_in_background: int = 0  # now
    num_forgotten: int = 0  # for the limits of tenants

    def samples(self) -> Iterator[Sample]:
        yield Sample(RESPONSES_IN_BACKGROUND, self.num_in_background)
        yield Sample(RESPONSES_FORGOTTEN, self.num_forgotten)


class Outcomes(Protocol):
    """Counts how requests ended."""

    def reject(self, status: Status) -> None:
        """Count a request that is not valid."""

    def end(self, event: RequestArrived, outcome: Finished | Refused, finish_reasons: Sequence[int]) -> None:
        """Count a request that is valid. `finish_reasons`: of its continuations that have ended."""


class Backend(Protocol):
    """The way to the core."""

    aborts: list[Abort]  # called when a client wants requests of its tenant ended
    kept: KeptCounts
    span_counts: Callable[[], Mapping[str, int]]  # how many spans were sent, failed and dropped so far

    @property
    def clock(self) -> Clock: ...
    @property
    def outcomes(self) -> Outcomes: ...
    @property
    def connections(self) -> Connections:
        """The counter of connections to the public port, if the port has TLS; metrics add up all frontends."""

    def readiness(self) -> Readiness: ...

    def submit(self, event: RequestArrived, answer: Answer) -> None:
        """Hand a request to the core; `answer` receives its tokens and its end."""

    def leave(self, request_id: RequestId) -> None:
        """Cancel a request: nobody waits for its answer any more."""

    def fail(self, error: Exception) -> None:
        """Stop the process: after an error of our own its state is unknown."""

    async def live(self) -> State:
        """Return what the live page shows, of all tenants."""

    async def live_request(self, name: str) -> dict[str, Any] | None:
        """Return everything about one request, by its id in hexadecimal; None for an unknown id."""

    async def metrics(self) -> bytes:
        """Return the router's metrics as text; empty if metrics are off."""

    async def engine(self) -> EngineState: ...

    def abort(self, tenant: str, names: Sequence[str]) -> None:
        """End requests of a tenant in every frontend. `names`: the names that the client gave them."""
