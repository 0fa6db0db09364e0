"""What workers report of requests and routers act on: stages of a request's life, and why attempts failed."""

from enum import Enum, StrEnum, auto

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
