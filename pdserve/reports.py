"""What workers report and routers act on: stages of a request's life, why attempts failed, and a worker's load."""

from dataclasses import field
from enum import Enum, StrEnum, auto

from pdserve.roles import Role
from pdserve.values import value


@value
class LoadPart:
    """The part of a worker's load that comes from some of its routers. Each continuation of a request counts."""

    num_running: int = 0  # in the batch
    num_coming: int = 0  # accepted, and not decoding yet
    placed_tokens: int = 0  # of all of these, when they were placed
    waiting_tokens: int = 0  # of prompts, yet to be computed there
    waiting_work: int = 0  # of their attention
    num_taken: int = 0  # sequences taken in since the process started
    taken_tokens: int = 0  # of prompts to compute there, the same
    taken_work: int = 0

    def minus(self, part: "LoadPart") -> "LoadPart":
        return LoadPart(*(getattr(self, name) - getattr(part, name) for name in _PARTS))


_PARTS = tuple(LoadPart.__annotations__)


@value
class ReportedLoad:
    """What a worker reports of its load, as far as decisions depend on it."""

    pages_free: int
    pages_wanted: int = 0  # that requests taken in wait for
    pages_lost: int = 0  # in quarantine, or leaked
    draining: bool = False
    failed_steps: int = 0  # the last ones, in a row
    others: LoadPart = field(default_factory=LoadPart)  # what other routers have sent
    role: Role | None = None  # what it does now; None: unknown
    role_epoch: int = 0


FINISH_REASONS = {1: "stop", 2: "length"}  # of a continuation, by their numbers in inference.proto


class Stage(StrEnum):
    """What a request goes through. Those that happen on workers have the same names in link.proto."""

    RECEIVED = "received"
    TOKENIZED = "tokenized"
    ADMITTED = "admitted"
    PLACED = "placed"
    PREFILL_QUEUED = "prefill_queued"
    FETCHED = "fetched"
    PREFILL_STARTED = "prefill_started"
    PREFILL_DONE = "prefill_done"
    FIRST_TOKEN = "first_token"
    GRANTED = "granted"
    LANDED = "landed"
    COMMITTED = "committed"
    DECODE_JOINED = "decode_joined"
    FINISHED = "finished"


class Failure(Enum):
    """Why a worker gave an attempt up."""

    PEER_LOST = auto()
    TRANSFER_FAILED = auto()
    DIGEST_MISMATCH = auto()
    OVERLOADED = auto()
    INVALID = auto()
    INTERNAL = auto()
    LEASE_LAPSED = auto()
    SENDER_GAVE_UP = auto()  # and reports the reason itself, if there is one to report
