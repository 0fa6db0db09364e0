"""What operators ask of a cluster that serves: other roles, and moves of running continuations."""

import random
from collections.abc import Callable

from faultsim.cluster import Cluster
from faultsim.router import RouterProcess
from faultsim.scenario import Scenario
from pdserve.base.ids import WorkerId
from pdserve.base.roles import Role
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.events import MovesAsked, RoleAsked

FLIP_SEEDS = 0.5  # share of seeds in which roles change; none of the calm ones
RESTORE_S = 1.0  # after all faults
FORCED = 0.2  # share of changes that may leave no worker for prompts, or to decode
BOTH_ASK = 0.3  # share of changes for which two routers ask at once, each for its own
MOVE_SEEDS = 0.8  # share of seeds in which continuations move on request


class Operators:
    """Asks at random moments. It has a source of chance of its own, so that it changes no other fault of a seed."""

    def __init__(self, cluster: Cluster, scenario: Scenario) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = random.Random(f"operators {scenario.seed}")
        self._span_s = scenario.span_s
        self._stopped = False
        if self._rng.random() < MOVE_SEEDS:
            self._plan(self._move, self._rng.randrange(20, 400))
        if self._rng.random() < FLIP_SEEDS and not scenario.is_calm:
            self._plan(self._flip, self._rng.randrange(2, 20))

    def stop(self) -> None:
        """Ask for nothing more, but for the roles that workers began with: somebody has to serve."""
        self._stopped = True
        self._world.after(RESTORE_S, None, self._restore)

    def _plan(self, ask: Callable[[], object], times: int) -> None:
        for _ in range(times):
            self._world.at(self._rng.uniform(0.8, 0.8 + self._span_s), None, self._act, ask)

    def _act(self, ask: Callable[[], object]) -> None:
        if not self._stopped:
            ask()

    def _move(self) -> None:
        """Ask for some of what decodes on a worker to move, anywhere or to another worker."""
        router = next(iter(self._routers()), None)
        workers = [] if router is None else list(router.core.workers)
        sources = [worker for worker in workers if router is not None and router.core.moving.num_movable(worker)]
        if router is None or not sources:
            return
        source, target, count = self._rng.choice(sources), self._rng.choice(workers), self._rng.choice((0, 1, 1, 4))
        has_target = target is not source and self._rng.random() < 0.5
        self._world.note("operator", f"{count or 'all'} of {source.name} to {target.name if has_target else 'any'}")
        asked = MovesAsked(source.link, target.link if has_target else None, count)
        self._world.after(0.0, router, router.post, asked)

    def _flip(self) -> None:
        """Ask for another role of a worker, perhaps two routers at once for different ones."""
        routers = self._routers()
        names = [worker.name for router in routers[:1] for worker in router.core.workers]
        if not names:
            return
        name, force = self._rng.choice(names), self._rng.random() < FORCED
        for router in routers if self._rng.random() < BOTH_ASK else routers[:1]:
            worker, role = router.core.workers.named(WorkerId(name)), self._rng.choice(tuple(Role))
            if worker is None or router.core.workers.role_refusal(worker, Role.MIXED, force=True):
                continue  # it is too small to have each of the roles
            if not router.core.workers.role_refusal(worker, role, force=force):
                self._ask(router, worker, role)

    def _restore(self) -> None:
        for router in self._routers():
            for worker in router.core.workers:
                role = Role.DECODE if worker.name.startswith("d") else Role.PREFILL
                if not worker.role.is_in(role):
                    self._ask(router, worker, role)
        self._world.after(RESTORE_S, None, self._restore)  # a process that was frozen may attach later

    def _ask(self, router: RouterProcess, worker: WorkerView, role: Role) -> None:
        self._world.note("operator", f"{worker.name} is to be {role}")
        asked = RoleAsked(worker.link, role, worker.registration.role_epoch + 1)
        self._world.after(0.0, router, router.post, asked)

    def _routers(self) -> list[RouterProcess]:
        living = [router for router in self._cluster.routers.values() if router.alive]
        return self._rng.sample(living, len(living))
