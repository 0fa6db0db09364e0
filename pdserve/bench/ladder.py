"""Where a request's time went, from the rungs in its ledger. Pure.

The first four parts add up to the router's TTFT; the last four to the time from the end of the prompt's computing to
the decode worker's first step.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

Rungs = Mapping[str, float]  # milliseconds after "received"

PARTS: dict[str, Callable[[Rungs], float]] = {
    "placed": lambda at: at["placed"] - at["received"],
    "prefill queue": lambda at: at["prefill_started"] - at["placed"],
    "prefill": lambda at: at["prefill_done"] - at["prefill_started"],
    "first token": lambda at: at["first_token"] - at["prefill_done"],
    "wait for a grant": lambda at: max(0.0, at["granted"] - at["prefill_done"]),
    "until landed": lambda at: at["landed"] - max(at["prefill_done"], at["granted"]),
    "until committed": lambda at: at["committed"] - at["landed"],
    "until decoding": lambda at: at["decode_joined"] - at["committed"],
}


def part_times(rungs: Rungs) -> dict[str, float]:
    """Return the milliseconds in each part whose rungs a request has reached: without a hand-off, only the first."""
    times = {}
    for name, part in PARTS.items():
        with suppress(KeyError):
            times[name] = part(rungs)
    return times
