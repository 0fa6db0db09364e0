"""What processes report to each other.

Workers report to routers: their load, the stages of a request's life, and why attempts failed. Routers report to the
autoscaler what clients asked for.
"""

from collections.abc import Collection
from dataclasses import field
from enum import Enum, StrEnum, auto
from math import ceil, log2
from operator import add, sub
from typing import Any, NamedTuple

from pdserve.base.roles import Role
from pdserve.base.values import value

NUM_BANDS = 48  # the last one's requests have up to 2**23.5 tokens, or more


class LoadPart(NamedTuple):
    """The part of a worker's load that some of its routers cause. Each continuation of a request counts."""

    num_running: int = 0  # in the batch
    num_coming: int = 0  # accepted, not decoding yet
    placed_tokens: int = 0  # of running and coming ones, when they were placed
    waiting_tokens: int = 0  # of prompts, yet to be computed there
    waiting_work: int = 0  # attention work of the waiting tokens
    num_taken: int = 0  # sequences accepted since the process started
    taken_tokens: int = 0  # of prompts to compute, accepted since the process started
    taken_work: int = 0  # attention work of these tokens

    def plus(self, part: "LoadPart") -> "LoadPart":
        return LoadPart(*map(add, self, part))

    def minus(self, part: "LoadPart") -> "LoadPart":
        return LoadPart(*map(sub, self, part))


def sum_of(parts: Collection[LoadPart]) -> LoadPart:
    return LoadPart(*map(sum, zip(*parts, strict=True)))


@value
class ReportedLoad:
    """What a worker reports about its load, as far as decisions depend on it."""

    pages_free: int
    pages_wanted: int = 0  # that accepted requests wait for
    pages_lost: int = 0  # in quarantine, or leaked
    draining: bool = False
    failed_steps: int = 0  # the last ones, in a row
    others: LoadPart = field(default_factory=LoadPart)  # load that other routers cause
    role: Role | None = None  # None: unknown
    role_epoch: int = 0


FINISH_REASONS = {1: "stop", 2: "length"}  # of a continuation, by their numbers in inference.proto


class Stage(StrEnum):
    """A stage of a request's life. The stages on workers have the same names in link.proto."""

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
    """Why a worker gave up an attempt."""

    PEER_LOST = auto()
    TRANSFER_FAILED = auto()
    DIGEST_MISMATCH = auto()
    OVERLOADED = auto()
    INVALID = auto()
    INTERNAL = auto()
    LEASE_LAPSED = auto()
    SENDER_GAVE_UP = auto()  # the sender reports the reason, if there is one


def band_of(num_tokens: int) -> int:
    """Return the band of a length: band k holds those above 2**((k - 1) / 2), up to 2**(k / 2)."""
    return min(NUM_BANDS - 1, ceil(2 * log2(max(1, num_tokens))))


def middle_of(band: int) -> float:
    """Return the length, tokens, that stands for a band: its geometric middle."""
    return float(2 ** ((band - 0.5) / 2)) if band else 1.0


@value
class Demand:
    """Counts of requests and tokens. A router's count up from its start."""

    num_requests: int = 0  # that arrived, refused ones included
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens: those found in a cache, which no worker computed
    answer_tokens: int = 0  # delivered
    prompts: tuple[int, ...] = (0,) * NUM_BANDS  # requests by prompt tokens to compute
    answers: tuple[int, ...] = (0,) * NUM_BANDS  # answers that were not cut off, by their tokens
    num_judged: int = 0  # requests that have ended and had objectives, refused ones included
    num_within_ttft: int = 0
    num_within_tpot: int = 0
    num_within_both: int = 0
    num_pooled: int = 0  # of num_requests: those for a vector, which no answer follows
    pooled_tokens: int = 0  # of prompt_tokens: those of requests for a vector

    def __add__(self, other: "Demand") -> "Demand":
        return self._combined(other, 1)

    def since(self, before: "Demand") -> "Demand":
        """Return what came after an earlier count; all of it where a router has started again between the two."""
        gone = self._combined(before, -1)
        counts = [getattr(gone, name) for name in _COUNTS]
        least = min(min(count) if isinstance(count, tuple) else count for count in counts)
        return self if least < 0 else gone

    def _combined(self, other: "Demand", sign: int) -> "Demand":
        parts: dict[str, Any] = {}
        for name in _COUNTS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, tuple):
                parts[name] = tuple(one + sign * another for one, another in zip(mine, theirs, strict=True))
            else:
                parts[name] = mine + sign * theirs
        return Demand(**parts)


_COUNTS = tuple(Demand.__annotations__)
