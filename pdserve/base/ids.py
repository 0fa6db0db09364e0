"""Names of things that cross process borders."""

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", bytes)  # 16 random bytes, minted by the router
Attempt = NewType("Attempt", int)  # placement of a request, from 0; counts up when it is placed again
WorkerId = NewType("WorkerId", str)  # stable name an operator gives a worker
Incarnation = NewType("Incarnation", int)  # 64 bits per process start; of two of one name, the later has the greater
PageId = NewType("PageId", int)  # index into one worker's page pool
Generation = NewType("Generation", int)  # how often a page has been given out


class Peer(NamedTuple):
    """One process of a worker. A restarted worker is another peer."""

    worker_id: WorkerId
    incarnation: Incarnation


class AttemptKey(NamedTuple):
    """Names one attempt of a request, and the hand-off that it may need."""

    request_id: RequestId
    attempt: Attempt


PROTOCOL_VERSION = 11  # of Link and Handoff; processes with different ones never work together
MAX_WORKER_TASKS = 1024  # requests placed on one worker at once; it refuses more


def new_request_id() -> RequestId:
    return RequestId(secrets.token_bytes(16))
