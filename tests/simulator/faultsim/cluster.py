"""A simulated cluster: its processes, who finds whom, and the launcher that starts them again."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from faultsim.decode import DecodeProcess
from faultsim.network import Network
from faultsim.prefill import PrefillProcess
from faultsim.process import Process
from faultsim.router import RouterProcess
from faultsim.scenario import Scenario
from faultsim.world import ViolationError, World
from pdserve.ids import Incarnation
from pdserve.kvtransfer.session import Peer
from pdserve.router.config import Limits
from pdserve.router.events import ProcessEnded

MAX_GONE = 64  # ended processes that a launcher tells a router when it starts again

Worker = PrefillProcess | DecodeProcess


class Cluster:
    """All processes by name. A name's process may be dead until the launcher has started the next."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        self.network = Network(world, scenario.mean_delay_s)
        self.routers: dict[str, RouterProcess] = {}
        self.workers: dict[str, Worker] = {}
        self._by_peer: dict[Peer, Worker] = {}
        self._gone: deque[ProcessEnded] = deque(maxlen=MAX_GONE)  # as its launcher knows
        self.zombies: list[Worker] = []  # came round, and live
        self._num_started = self._num_hung = 0
        self.on_start: Callable[[Worker], object] = lambda worker: None
        for number in range(scenario.num_routers):
            self.start(f"r{number}")
        for number in range(scenario.num_prefill):
            self.start(f"p{number}")
        for number in range(scenario.num_decode):
            self.start(f"d{number}")

    def start(self, name: str) -> None:
        """Start the next incarnation of a process."""
        self._num_started += 1
        incarnation = Incarnation(1000 + self._num_started)
        if name.startswith("r"):
            self.routers[name] = RouterProcess(self.network, name, incarnation, Limits())
            self.network.processes[name] = self.routers[name]
            for gone in self._gone:
                self._report(name, gone)
            return
        worker = self._new_worker(name, incarnation)
        self.on_start(worker)
        self.network.processes[name] = self.workers[name] = worker
        worker.start(self.routers)

    def come_round(self, name: str) -> Worker:
        """Let a process of a name go on that hung when it had loaded, and was given up and followed."""
        self._num_hung += 1
        zombie = self._new_worker(name, Incarnation(100 + self._num_hung))
        zombie.size = replace(zombie.size, load_s=0.0)
        zombie.started_s = 0.0
        self.zombies.append(zombie)
        zombie.start(self.routers)
        return zombie

    def end(self, process: Process) -> None:
        """Let a process be over; its launcher notices, tells the routers, and starts it again if nobody follows it."""
        if not process.alive:
            return
        process.crash()
        self.zombies = [zombie for zombie in self.zombies if zombie.alive]
        rng = self.world.rng
        delay_s = rng.random() ** 6 * 3.0  # until it is reaped
        if isinstance(process, PrefillProcess | DecodeProcess):
            is_explained = process.incarnation % 2 == 0
            gone = ProcessEnded(process.peer.worker_id, process.incarnation, is_explained)
            late_s = rng.random() * rng.choice((0.01, 0.1, 3.0))
            self.world.after(delay_s + late_s, None, self._note_gone, gone)
        if process in (self.routers.get(process.name), self.workers.get(process.name)):
            self.world.after(delay_s + rng.uniform(0.1, 0.8), None, self.start, process.name)

    def find_peer(self, peer: Peer) -> Worker | None:
        """Return the process of one incarnation, dead or alive."""
        return self._by_peer.get(peer)

    def processes(self) -> list[RouterProcess | Worker]:
        """Return the living."""
        known = (*self.routers.values(), *self.workers.values(), *self.zombies)
        return [process for process in known if process.alive]

    def _new_worker(self, name: str, incarnation: Incarnation) -> Worker:
        worker = self._new_decode(name, incarnation) if name.startswith("d") else self._new_prefill(name, incarnation)
        worker.on_exit = lambda: self.end(worker)
        worker.on_dismissed = lambda: self._dismiss(worker)
        self._by_peer[worker.peer] = worker
        return worker

    def _dismiss(self, worker: Worker) -> None:
        """End a process that a router has sent away; ViolationError unless somebody follows it."""
        if worker is self.workers[worker.name]:
            raise ViolationError("I7", f"{worker} was sent away, and nobody follows it")
        self.end(worker)

    def _new_decode(self, name: str, incarnation: Incarnation) -> DecodeProcess:
        return DecodeProcess(self.network, name, incarnation, self.scenario.decode_size, self.scenario.lease_s)

    def _new_prefill(self, name: str, incarnation: Incarnation) -> PrefillProcess:
        worker = PrefillProcess(self.network, name, incarnation, self.scenario.prefill_size, self.find_peer)
        worker.mover.faults = self.scenario.copy_faults
        return worker

    def _note_gone(self, gone: ProcessEnded) -> None:
        self._gone.append(gone)
        for router in self.routers:
            self._report(router, gone)

    def _report(self, router: str, gone: ProcessEnded) -> None:
        """Tell a router that a process has ended, if it is there to hear it."""
        process = self.routers[router]
        self.world.after(0.001 + self.world.rng.random() * 0.01, process, process.post, gone)
