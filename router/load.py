"""What a worker reports of its load. Pure values."""

from dataclasses import field

from pdserve.values import value


@value
class Others:
    """What of a worker's load other routers have sent. Continuations of one request count each."""

    num_running: int = 0  # in the batch
    num_coming: int = 0  # taken in, and not decoding yet
    placed_tokens: int = 0  # that all these had when they were placed
    waiting_tokens: int = 0  # of prompts, yet to be computed there
    waiting_work: int = 0  # of their attention
    num_taken: int = 0  # sequences taken in since the process started
    taken_tokens: int = 0  # of prompts to compute there, the same
    taken_work: int = 0


@value
class Load:
    """What a worker reported of its load."""

    pages_free: int
    pages_wanted: int = 0  # that requests taken in wait for
    pages_lost: int = 0  # in quarantine, or leaked
    draining: bool = False
    failed_steps: int = 0  # the last ones, in a row
    others: Others = field(default_factory=Others)
