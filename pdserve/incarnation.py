"""Mints identities of process starts, of which a later one is greater, by the clock of the machine.

Identities of one name are only compared with each other: nobody reads a time out of them. `docs/handoff.md` describes
what a wrong clock can do.
"""

import secrets
import time

from pdserve.ids import Incarnation

_RANDOM_BITS = 22  # the 42 above them last until 2109


def new_incarnation() -> Incarnation:
    """Mint a process start's identity: its milliseconds since 1970, then random bits. Never 0: that is unknown."""
    return Incarnation(time.time_ns() // 1_000_000 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))
