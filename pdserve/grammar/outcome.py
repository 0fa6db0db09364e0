"""What became of a specification that was to be compiled."""

from enum import StrEnum


class Outcome(StrEnum):
    """As the process that compiles writes it."""

    COMPILED = "compiled"
    REFUSED = "refused"  # it is wrong, and will be
    OVER_LIMIT = "over limit"  # which it may be on a busy machine alone
    ENDED = "ended"  # by others, as where the machine's memory runs out
