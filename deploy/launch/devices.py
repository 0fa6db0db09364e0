"""Deals out the GPUs of this machine, one for each rank, so that no two ranks share one while another is free.

Invariant: a worker keeps its GPUs until it is released, however often its process starts again.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from pdserve.base.errors import ConfigError
from pdserve.base.roles import Role
from pdserve.launch.plan import WORKER_ROLES, ClusterSpec
from pdserve.settings.config import WorkerConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT_LIMIT_S = 60.0  # torch takes seconds to import
_COUNT = "import torch; print(torch.cuda.device_count())"
_SHARE = "gpu_memory_utilization"
_DEFAULT_SHARE: float = WorkerConfig.model_fields[_SHARE].default


class Devices:
    """GPUs by the names that CUDA_VISIBLE_DEVICES has for them, and the workers that hold them."""

    def __init__(self, names: Sequence[str], num_ranks: Mapping[str, int]) -> None:
        """`num_ranks`: of the workers of each role that compute on GPUs."""
        self._names = names
        self._num_ranks = num_ranks
        self._held: dict[str, list[str]] = {}  # by worker

    def hold(self, worker: str, role: str) -> Mapping[str, str]:
        """Return what is in a worker's environment: it sees a GPU for each rank, those which the fewest others have."""
        if role not in self._num_ranks:
            return {}
        if worker not in self._held:
            held = Counter(chain.from_iterable(self._held.values()))
            least = sorted(self._names, key=lambda name: held[name])[: self._num_ranks[role]]
            self._held[worker] = sorted(least, key=self._names.index)
        return {VISIBLE: ",".join(self._held[worker])}

    def release(self, worker: str) -> None:
        """Take note that a worker has ended for good."""
        self._held.pop(worker, None)


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process's children may use; ConfigError if torch does not answer.

    Of those that are named, CUDA takes the ones before the first that is none.
    """
    given = environment.get(VISIBLE)
    if given is None:
        command = (sys.executable, "-P", "-c", _COUNT)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COUNT_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--device: torch does not say within {COUNT_LIMIT_S:g} s what CUDA devices there are"
            ) from error
        return [str(index) for index in range(int(done.stdout or 0))]
    names = [name.strip() for name in given.split(",")]
    end = next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:end]


def deal(spec: ClusterSpec) -> tuple[Devices | None, ClusterSpec]:
    """Return the GPUs that a cluster's workers are to hold, and the cluster with the share of one that each gets.

    None if no worker asks for a GPU, or another machine has them. ConfigError if there is none, if a worker has more
    ranks than there are, or if workers that share a GPU would take more than all of it.
    """
    roles = [role for role in WORKER_ROLES if spec.flags_of(role).get("device") == "cuda"]
    if not roles or spec.elsewhere:
        return None, spec
    names = visible_devices(os.environ)
    if not names:
        raise ConfigError("--device: cuda is asked for, and no CUDA device is visible here")
    num_ranks = {role: num_ranks_of(spec, role) for role in roles}
    if (most := max(num_ranks.values())) > len(names):
        raise ConfigError(f"--tensor-parallel-size: {most} ranks need a GPU each, and {len(names)} are visible here")
    num_sharing = -(-_num_wanted(spec, num_ranks) // len(names))
    if num_sharing > 1:
        spec = _shared(spec, roles, num_sharing, len(names))
    return Devices(names, {role.value: each for role, each in num_ranks.items()}), spec


def num_ranks_of(spec: ClusterSpec, role: Role) -> int:
    """Return how many ranks a worker of a role has, each of which takes a GPU where there are any."""
    return int(str(spec.flags_of(role).get("tensor_parallel_size", 1)))


def check_devices(spec: ClusterSpec, num_devices: Mapping[Role, int]) -> None:
    """Raise ConfigError where a replica holds more GPUs than its worker has ranks, or fewer."""
    for role, held in num_devices.items():
        num_ranks = num_ranks_of(spec, role)
        if spec.flags_of(role).get("device") == "cuda" and held != num_ranks:
            text = f"is {held}, and a {role} worker has {num_ranks} ranks with a GPU each"
            raise ConfigError(f"pools.{role}.devicesPerReplica: {text}")


def _num_wanted(spec: ClusterSpec, num_ranks: Mapping[Role, int]) -> int:
    """Return how many ranks may want a GPU at once."""
    counts = {Role.PREFILL: spec.num_prefill, Role.DECODE: spec.num_decode, Role.MIXED: spec.num_mixed}
    num_later = spec.most_workers - spec.num_workers
    return sum(counts[role] * each for role, each in num_ranks.items()) + num_later * max(num_ranks.values())


def _shared(spec: ClusterSpec, roles: Sequence[Role], num_sharing: int, num_devices: int) -> ClusterSpec:
    """Return a cluster whose workers leave one another room on each GPU."""
    role_flags = dict(spec.role_flags)
    for role in roles:
        given = spec.flags_of(role).get(_SHARE)
        if given is None:
            role_flags[role] = {**role_flags.get(role, {}), _SHARE: round(_DEFAULT_SHARE / num_sharing, 4)}
        elif num_sharing * float(str(given)) > 1:
            text = f"{num_sharing} workers share each of {num_devices} devices, so each may take {1 / num_sharing:.3g}"
            raise ConfigError(f"--gpu-memory-utilization: {given} is refused: {text}")
    return replace(spec, role_flags=role_flags)
