"""How many threads each process of a local cluster computes with."""

import os
from collections.abc import Mapping

SPIN_COUNT = "20000"  # fractions of a millisecond


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def child_environment(environment: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Return the children's environment: what the user set stays, OpenMP shares the machine politely.

    Prefill and decode workers rarely compute at the same moment under light load, so each may use all cores. Threads
    spin between the many short loops of a step, or waking them would double the time of a decode step; they soon
    stop, so that an idle worker leaves the cores to the other one.
    """
    polite = {"OMP_NUM_THREADS": str(num_cores), "GOMP_SPINCOUNT": SPIN_COUNT, "KMP_BLOCKTIME": "1"}
    return {**polite, **environment}
