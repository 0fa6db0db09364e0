"""How the engine's CPU threads wait for one another. To be settled before torch loads OpenMP."""

import os
from collections.abc import MutableMapping

SPIN_COUNT = "20000"  # fractions of a millisecond


def set_thread_defaults(environment: MutableMapping[str, str]) -> None:
    """Choose how OpenMP's threads share the machine; what the user set stays.

    Prefill and decode workers rarely compute at the same moment under light load, so each may use all cores. Threads
    spin between the many short loops of a step, or waking them would double the time of a decode step; they soon
    stop, so that an idle worker leaves the cores to the other one.
    """
    environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    environment.setdefault("KMP_BLOCKTIME", "1")
