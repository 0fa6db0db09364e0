"""Processes that hung before they had done anything, were given up and followed, and come round.

Each is earlier than all others of its name, serves as well as they do, and is killed when its launcher notices. It
had nothing under way when its successor started; otherwise no rule could tell its writes from those of the dead.
"""

import random
from collections.abc import Callable

from faultsim.cluster import Cluster
from faultsim.router import RouterProcess
from faultsim.scenario import Scenario
from faultsim.worker import WorkerProcess

KINDS = ("routers start again", "routers start again", "links are reset", "it is frozen")
LONGEST_LIFE_S = 4.0
BRIEF_S = 1.5  # a freeze that nobody takes for an end


class Zombies:
    """Lets each come round when who follows it is not attached: routers start again, or lost its links, or its beats.

    They have a source of chance of their own, so that they change no other seed.
    """

    def __init__(self, cluster: Cluster, scenario: Scenario, crash_router: Callable[[], object]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._crash_router = crash_router
        self._rng = random.Random(f"zombies {scenario.seed}")
        self._stopped = False
        for _ in range(scenario.num_zombies):
            at_s = self._rng.uniform(0.8, 0.8 + scenario.span_s)
            self._world.at(at_s, None, self._strike)

    def stop(self) -> None:
        """End those that live, and let no more come round."""
        self._stopped = True
        for zombie in list(self._cluster.zombies):
            self._cluster.end(zombie)

    def _strike(self) -> None:
        if self._stopped:
            return
        workers = list(self._cluster.workers.values())
        writers = [worker for worker in workers if worker.role == "prefill"]
        successor = self._rng.choice(writers if writers and self._rng.random() < 0.7 else workers)
        match self._rng.choice(KINDS):
            case "routers start again":
                for _ in self._cluster.routers:
                    self._crash_router()
                self._freeze(successor, self._rng.uniform(0.5, 3.0))
                delay_s = self._rng.uniform(0.0, 2.0)  # by then they have, and do not know everybody
            case "links are reset":
                for end in [end for end in successor.ends if isinstance(end.peer.owner, RouterProcess)]:
                    self._cluster.network.reset(end)
                delay_s = self._rng.uniform(0.0, 0.5)
            case _:
                self._freeze(successor, self._rng.uniform(4.0, 7.0))
                delay_s = self._rng.uniform(4.0, 6.0)  # by then routers have given it up
        self._world.after(delay_s, None, self._come_round, successor.name)

    def _come_round(self, name: str) -> None:
        if self._stopped:
            return
        self._world.note("chaos", f"a zombie of {name}")
        zombie = self._cluster.come_round(name)
        self._world.after(self._rng.uniform(0.5, LONGEST_LIFE_S), None, self._cluster.end, zombie)
        zombie.site = lambda site, _: self._visit(zombie) if site != "granted" else None

    def _visit(self, zombie: WorkerProcess) -> None:
        """Perhaps freeze a zombie in the middle of a copy, or right after a commit."""
        if not self._stopped and self._rng.random() < 0.2:
            self._world.after(0.0, None, self._freeze, zombie, self._rng.uniform(0.0, BRIEF_S))

    def _freeze(self, process: WorkerProcess, duration_s: float) -> None:
        if process.alive and not process.frozen:
            process.freeze()
            self._world.after(duration_s, None, process.thaw)
