"""The processes of a worker's ranks but the first: they may freeze by themselves, and end after it."""

import random
from collections.abc import Sequence

from faultsim.world import Process

LINGERS_S = (0.0, 0.05, 2.0)  # at most, until the kernel has ended a rank whose first one has ended


class OtherRanks:
    """They have a source of chance of their own, so that they change no seed without them."""

    def __init__(self, worker: Process, processes: Sequence[Process]) -> None:
        self._world = worker.world
        self._processes = processes
        self._rng = random.Random(f"ranks of {worker!r} {worker.world.seed}")

    def end(self) -> float:
        """Let them end, each in its time, once the first one has; return when the last one will have.

        Until then, one may not get to run for a while, and after that write on.
        """
        return max([self._end(process) for process in self._processes], default=0.0)

    def frozen_with(self, worker: Process) -> list[Process]:
        """Return which processes a fault freezes: the first rank, or another one, or all."""
        if not self._processes or self._rng.random() < 0.3:
            return [worker, *self._processes]
        return [worker] if self._rng.random() < 0.5 else [self._rng.choice(self._processes)]

    def _end(self, process: Process) -> float:
        lives_s = self._rng.random() * self._rng.choice(LINGERS_S)
        if not process.frozen:
            process.freeze()
            self._world.after(self._rng.random() * lives_s, None, process.thaw)
        self._world.after(lives_s, None, process.crash)
        return lives_s
