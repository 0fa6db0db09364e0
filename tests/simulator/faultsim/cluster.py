"""A simulated cluster: its processes, who finds whom, and the launcher that starts them again."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from faultsim.mover import CopyFaults
from faultsim.network import Network
from faultsim.router import RouterProcess
from faultsim.scenario import Scenario
from faultsim.sharing import Sharing
from faultsim.worker import WorkerProcess
from faultsim.world import Process, ViolationError, World
from pdserve.base.ids import Incarnation, Peer
from pdserve.base.roles import Role, lacks_pages
from pdserve.router.config import Limits
from pdserve.router.requests.events import ProcessEnded

MIXED = 0.25  # share of workers that start again as mixed ones
REAPED_S = 3.0  # at most, until a launcher has noticed an end
START_S = 0.8  # at most, until it has started the next process
MAX_GONE = 64  # ended processes that a launcher tells a router when it starts again


class Cluster:
    """All processes by name. A name's process may be dead until the launcher has started the next."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        self.network = Network(world, scenario.mean_delay_s)
        self._policy = Sharing(scenario.seed)
        self._rng = random.Random(f"roles {scenario.seed}")
        self.routers: dict[str, RouterProcess] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self._by_peer: dict[Peer, WorkerProcess] = {}
        self._copy_faults = scenario.copy_faults
        self._gone: deque[ProcessEnded] = deque(maxlen=MAX_GONE)  # as its launcher knows
        self.zombies: list[WorkerProcess] = []  # came round, and live
        self._num_started = self._num_hung = 0
        self.on_start: Callable[[WorkerProcess], object] = lambda worker: None
        for number in range(scenario.num_routers):
            self.start(f"r{number}")
        for number in range(scenario.num_prefill):
            self.start(f"p{number}")
        for number in range(scenario.num_decode):
            self.start(f"d{number}")

    def start(self, name: str) -> None:
        self._num_started += 1
        incarnation = Incarnation(1000 + self._num_started)
        if name.startswith("r"):
            self.routers[name] = RouterProcess(self.network, name, incarnation, Limits(), self._policy)
            self.network.processes[name] = self.routers[name]
            for gone in self._gone:
                self._report(name, gone)
            return
        worker = self._new_worker(name, incarnation)
        self.on_start(worker)
        self.network.processes[name] = self.workers[name] = worker
        worker.start(self.routers, self.find_peer)

    def come_round(self, name: str) -> WorkerProcess:
        """Let a process of a name go on that hung when it had loaded, and was given up and followed."""
        self._num_hung += 1
        zombie = self._new_worker(name, Incarnation(100 + self._num_hung))
        zombie.size = replace(zombie.size, load_s=0.0)
        zombie.started_s = 0.0
        self.zombies.append(zombie)
        zombie.start(self.routers, self.find_peer)
        return zombie

    def end(self, process: Process) -> None:
        """Let a process be over; its launcher notices, tells the routers, and starts it again if nobody follows it."""
        if not process.alive:
            return
        process.crash()
        self.zombies = [zombie for zombie in self.zombies if zombie.alive]
        rng = self.world.rng
        delay_s = rng.random() ** 6 * REAPED_S
        if isinstance(process, WorkerProcess):
            delay_s = proved_after_s(delay_s, process.doors.other_ranks.end())
            is_explained = process.incarnation % 2 == 0
            gone = ProcessEnded(Peer(process.peer.worker_id, process.incarnation), is_explained)
            late_s = rng.random() * rng.choice((0.01, 0.1, 3.0))
            self.world.after(delay_s + late_s, None, self._note_gone, gone)
        if process in (self.routers.get(process.name), self.workers.get(process.name)):
            self.world.after(delay_s + rng.uniform(0.1, START_S), None, self.start, process.name)

    def heal_copies(self) -> None:
        """Let no more copies go wrong by themselves, of workers that live nor of those that start."""
        self._copy_faults = CopyFaults(page_s=self._copy_faults.page_s)
        for process in self.processes():
            if isinstance(process, WorkerProcess):
                for mover in process.doors.movers:
                    mover.faults = self._copy_faults

    def end_doubtful(self) -> None:
        """End the processes of which a copy may have bytes under way for ever: what they were granted comes back."""
        for process in self.processes():
            if isinstance(process, WorkerProcess) and any(mover.num_in_doubt for mover in process.doors.movers):
                self.end(process)

    def find_peer(self, peer: Peer) -> WorkerProcess | None:
        """Return the process of one incarnation, dead or alive."""
        return self._by_peer.get(peer)

    def processes(self) -> list[RouterProcess | WorkerProcess]:
        known: tuple[RouterProcess | WorkerProcess, ...] = (
            *self.routers.values(),
            *self.workers.values(),
            *self.zombies,
        )
        return [process for process in known if process.alive]

    def check_roles(self) -> None:
        """Raise ViolationError unless routers know the role of each worker that is attached to them."""
        workers = [worker for worker in self.workers.values() if worker.alive]
        for router in [router for router in self.routers.values() if router.alive]:
            for worker in workers:
                view = router.core.workers.named(worker.peer.worker_id)
                known = None if view is None else view.registration
                if known is None or known.incarnation != worker.incarnation:
                    continue
                if (known.role, known.role_epoch) != (worker.role, worker.witness.role_epoch):
                    text = f"{router} takes {worker} for a {known.role} worker of epoch {known.role_epoch}"
                    raise ViolationError("I7", f"{text}, which has become {worker.role} since")

    def _new_worker(self, name: str, incarnation: Incarnation) -> WorkerProcess:
        is_decode, scenario = name.startswith("d"), self.scenario
        size = scenario.decode_size if is_decode else scenario.prefill_size
        if name in scenario.lacking:
            size = replace(size, adapters=size.adapters[:1])
        role = Role.DECODE if is_decode else Role.PREFILL
        if name in self.workers and not lacks_pages(Role.MIXED, size.num_pages, size.max_num_pages):
            role = Role.MIXED if self._rng.random() < MIXED else role  # it has started before
        worker = WorkerProcess(self.network, name, incarnation, role, size, scenario.lease_s)
        worker.copy_faults = self._copy_faults
        worker.on_exit = lambda: self.end(worker)
        worker.on_dismissed = lambda: self._dismiss(worker)
        self._by_peer[worker.peer] = worker
        return worker

    def _dismiss(self, worker: WorkerProcess) -> None:
        """End a process that a router has sent away; ViolationError unless somebody follows it."""
        if worker is self.workers[worker.name]:
            raise ViolationError("I7", f"{worker} was sent away, and nobody follows it")
        self.end(worker)

    def _note_gone(self, gone: ProcessEnded) -> None:
        self._gone.append(gone)
        for router in self.routers:
            self._report(router, gone)

    def _report(self, router: str, gone: ProcessEnded) -> None:
        """Tell a router that a process has ended, if it is there to hear it."""
        process = self.routers[router]
        self.world.after(0.001 + self.world.rng.random() * 0.01, process, process.post, gone)


def proved_after_s(noticed_s: float, last_rank_s: float) -> float:
    """Return when a launcher reports an end, and may start the next process: once the last rank has ended, too."""
    return max(noticed_s, last_rank_s)
