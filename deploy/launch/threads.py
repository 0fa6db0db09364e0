"""How many threads each process of a local cluster computes with."""

import os
from collections.abc import Mapping


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def child_environment(environment: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Return the children's environment: what the user set stays, OpenMP shares the machine politely.

    Prefill and decode workers rarely compute at the same moment under light load, so each may use all cores. With
    active waiting an idle worker's threads would spin on the cores that the other one needs.
    """
    polite = {
        "OMP_NUM_THREADS": str(num_cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
    return {**polite, **environment}
