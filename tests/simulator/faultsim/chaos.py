"""What goes wrong, and when: at random times, and at the moments where it hurts most."""

from collections.abc import Callable

from faultsim.cluster import Cluster
from faultsim.hostile import Hostile
from faultsim.operators import Operators
from faultsim.router import RouterProcess
from faultsim.scenario import Scenario
from faultsim.worker import WorkerProcess
from faultsim.world import Process
from faultsim.zombies import Zombies
from pdserve.router.requests.events import DrainAsked

SITE_FAULTS = ("crash_worker", "freeze_worker", "reset_handoff", "cut_one_way")

LATE_S = 0.2  # before the last request: what breaks then is repaired by no later request's traffic
LATE_FACTOR = 10.0


class Chaos:
    """Carries out a scenario's faults until it is told to stop; then everything heals."""

    def __init__(self, cluster: Cluster, scenario: Scenario) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self._world = cluster.world
        self._rng = cluster.world.rng
        self._scenario = scenario
        self._stopped = False
        self._frozen: list[Process] = []
        self._broken: list[tuple[Process, Process]] = []
        self._hostile = Hostile(cluster)
        self._zombies = Zombies(cluster, scenario, self._crash_router)
        self._operators = Operators(cluster, scenario)
        self._timed: dict[str, Callable[[], object]] = {
            "crash_worker": self._crash_worker,
            "freeze_worker": lambda: self._freeze(self._worker(), 8.0),
            "crash_router": self._crash_router,
            "freeze_router": lambda: self._freeze(self._router(), 1.0),
            "reset_link": lambda: self._reset(self._router()),
            "reset_handoff": lambda: self._reset(self._worker()),
            "cut_one_way": lambda: self._cut(both=False),
            "blackhole": lambda: self._cut(both=True),
            "slow": self._slow,
            "drain": self._drain,
            "break_step": self._break_step,
            "hostile": self._hostile.strike,
        }
        kinds = sorted(scenario.faults & self._timed.keys())
        for _ in range(scenario.num_faults if kinds else 0):
            kind = self._rng.choice(kinds)
            times = 16 if kind == "hostile" else 1
            for _ in range(times):
                self._world.at(self._rng.uniform(0.2, 1.0 + scenario.span_s), None, self._strike, kind)
        self._site_faults = [kind for kind in SITE_FAULTS if kind in scenario.faults]
        if scenario.no_route is not None:
            self._network.undialled.add(scenario.no_route)
        cluster.on_start = self._equip
        for worker in cluster.workers.values():
            self._equip(worker)

    def stop(self) -> None:
        """Let nothing more go wrong, and heal what is broken."""
        self._stopped = True
        self._network.undialled.clear()
        self._cluster.heal_copies()
        self._zombies.stop()
        self._operators.stop()
        for process in self._frozen:
            process.thaw()
        for source, target in self._broken:
            self._network.heal(source, target)

    def _strike(self, kind: str) -> None:
        if not self._stopped:
            self._world.note("chaos", kind)
            self._timed[kind]()

    def _equip(self, worker: WorkerProcess) -> None:
        worker.site = self._visit

    def _visit(self, site: str, process: Process) -> None:
        """Perhaps strike, or forge something while a grant is open."""
        if self._site_faults:
            self._perhaps_strike(site, process)
        is_hostile = site == "granted" and "hostile" in self._scenario.faults and not self._stopped
        if is_hostile and isinstance(process, WorkerProcess) and self._rng.random() < 0.3:
            self._world.after(self._rng.random() * 0.01, None, self._hostile.speak_to, process)

    def _perhaps_strike(self, site: str, process: Process) -> None:
        is_late = self._world.now > self._scenario.wishes[-1].at_s - LATE_S
        chance = self._scenario.site_chance * (LATE_FACTOR if is_late else 1.0)
        if not self._stopped and self._rng.random() < chance:
            kind = self._rng.choice(self._site_faults)
            self._world.note("chaos", f"{kind} at {site}")
            self._world.after(0.0, None, self._hurt, kind, process)

    def _hurt(self, kind: str, process: Process) -> None:
        if not process.alive or self._stopped:
            return
        match kind:
            case "crash_worker":
                self._cluster.end(process)
            case "freeze_worker":
                self._freeze(process, 8.0)
            case "reset_handoff":
                self._reset(process)
            case _:
                self._cut_between(process, self._worker(), both=False)

    def _crash_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._cluster.end(worker)

    def _crash_router(self) -> None:
        router = self._router()
        if router is not None:
            clients = list(router.dispatcher.answers.values())
            router.dispatcher.answers.clear()
            self._cluster.end(router)
            for client in clients:
                client.lose_router()

    def _freeze(self, process: Process | None, longest_s: float) -> None:
        if process is None or process.frozen:
            return
        duration_s = self._rng.choice((0.1, 1.0, longest_s, 2.5 * longest_s)) * self._rng.random()
        hit = process.doors.other_ranks.frozen_with(process) if isinstance(process, WorkerProcess) else [process]
        for each in hit:
            if not each.frozen:
                each.freeze()
                self._network.watch_frozen(each)
                self._frozen.append(each)
                self._world.after(duration_s, None, each.thaw)

    def _reset(self, process: Process | None) -> None:
        """Break one of a process's streams: for a worker, to another worker if it has one."""
        if process is None or not process.ends:
            return
        ends = list(process.ends)
        if isinstance(process, WorkerProcess):
            ends = [end for end in ends if not isinstance(end.peer.owner, RouterProcess)] or ends
        self._network.reset(self._rng.choice(ends))

    def _cut(self, *, both: bool) -> None:
        processes = self._cluster.processes()
        if len(processes) > 1:
            source, target = self._rng.sample(processes, 2)
            self._cut_between(source, target, both=both)

    def _cut_between(self, source: Process, target: Process | None, *, both: bool) -> None:
        if target is None or source.name == target.name:
            return
        duration_s = self._rng.choice((0.2, 2.0, 20.0)) * self._rng.random()
        for one, other in ((source, target), (target, source))[: 1 + both]:
            self._network.cut(one, other)
            self._broken.append((one, other))
            self._world.after(duration_s, None, self._network.heal, one, other)

    def _slow(self) -> None:
        processes = self._cluster.processes()
        if len(processes) < 2:
            return
        source, target = self._rng.sample(processes, 2)
        self._network.slow(source, target, self._rng.choice((5.0, 50.0)))
        self._broken.append((source, target))
        self._world.after(self._rng.uniform(0.1, 3.0), None, self._network.heal, source, target)

    def _drain(self) -> None:
        router, worker = self._router(), self._worker()
        if router is None or worker is None:
            return
        link_id = router.link_of(worker.peer)
        if link_id is not None:
            self._world.after(0.0, router, router.post, DrainAsked(link_id))

    def _break_step(self) -> None:
        worker = self._worker()
        if worker is not None:
            worker.break_next_step = True

    def _worker(self) -> WorkerProcess | None:
        living = [process for process in self._cluster.workers.values() if process.alive]
        return self._rng.choice(living) if living else None

    def _router(self) -> RouterProcess | None:
        living = [process for process in self._cluster.routers.values() if process.alive]
        return self._rng.choice(living) if living else None
