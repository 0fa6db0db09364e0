"""Streams between simulated processes, as gRPC over TCP gives them, and how these break.

A stream delivers in order or not at all. A cut path holds what is on its way until it heals, or until keepalive
ends the stream; a reset tells both ends, at different times; a dead process's peers learn of it soon.
"""

from collections.abc import Callable

from faultsim.world import Process, World
from pdserve.base.clock import Action

KEEPALIVE_S = 15.0  # a silent path ends its streams: rpc's ping interval and time-out
CONNECT_TIMEOUT_S = 2.0
MAX_BREAK_S = 1.0  # how long an end may not know of a reset

Message = object


class End:
    __slots__ = ("clear_s", "closed", "held", "lost", "network", "owner", "peer", "receive")

    def __init__(self, network: "Network", owner: Process) -> None:
        self.network = network
        self.owner = owner
        self.peer = self
        self.closed = False
        self.clear_s = 0.0  # when the last message sent from here arrives
        self.held: list[tuple[Action, tuple[object, ...]]] = []  # arrived here while the path was cut
        self.receive: Callable[[Message], object] = _nobody
        self.lost: Callable[[str], object] = _nobody
        owner.ends[self] = network.ends[self] = None

    def send(self, message: Message) -> None:
        """Send a message; nothing happens on a stream that has ended."""
        if not self.closed:
            self.network.world.num_messages += 1
            self._transmit(self.peer.arrive, message)

    def close(self, reason: str) -> None:
        """End the stream in order: the other side learns of it after all that was sent."""
        if not self.closed:
            self._shut()
            self._transmit(self.peer.receive_end, reason)

    def die(self) -> None:
        """Break the stream because this side's process has ended."""
        self._shut()
        self._transmit(self.peer.receive_end, "its process ended")

    def arrive(self, message: Message) -> None:
        if self.held or (self.network.cuts and self.network.is_cut(self.peer.owner, self.owner)):
            self.held.append((self.arrive, (message,)))
        elif not self.closed:
            self.receive(message)

    def receive_end(self, reason: str) -> None:
        """Learn from the other side that the stream has ended."""
        if self.held or self.network.is_cut(self.peer.owner, self.owner):
            self.held.append((self.receive_end, (reason,)))
        else:
            self.break_off(reason)

    def break_off(self, reason: str) -> None:
        """Learn that the stream has ended; what was on its way is lost."""
        if not self.closed:
            self._shut()
            self.lost(reason)

    def _shut(self) -> None:
        self.closed = True
        self.owner.ends.pop(self, None)
        self.network.ends.pop(self, None)
        self.held.clear()

    def _transmit(self, action: Action, what: object) -> None:
        network, receiver = self.network, self.peer.owner
        world = network.world
        self.clear_s = max(self.clear_s, world.now + network.delay_s(self.owner, receiver))
        world.at(self.clear_s, receiver, action, what)


class Network:
    """All paths between processes, by their names."""

    def __init__(self, world: World, mean_delay_s: float) -> None:
        self.world = world
        self._mean_delay_s = mean_delay_s
        self.cuts: dict[tuple[str, str], int] = {}  # direction -> which cut
        self.undialled: set[tuple[str, str]] = set()  # who can open no stream to whom
        self._slow: dict[tuple[str, str], float] = {}
        self._num_cuts = 0
        self.ends: dict[End, None] = {}  # of all streams, not closed
        self.processes: dict[str, Process] = {}  # who is dialled at a name, dead or alive

    def delay_s(self, source: Process, target: Process) -> float:
        chance = self.world.rng.random()
        delay_s = self._mean_delay_s * (0.2 + chance) * (20.0 if chance > 0.995 else 1.0)
        return delay_s * self._slow.get((source.name, target.name), 1.0) if self._slow else delay_s

    def is_cut(self, source: Process, target: Process) -> bool:
        return (source.name, target.name) in self.cuts

    def dial(
        self,
        source: Process,
        address: str,
        opened: Callable[[End], object],
        failed: Callable[[str], object],
    ) -> None:
        """Open a stream to the process of a name; exactly one of the callbacks follows."""
        self.world.after(2 * self._mean_delay_s, source, self._dialled, source, address, opened, failed)

    def _dialled(
        self,
        source: Process,
        address: str,
        opened: Callable[[End], object],
        failed: Callable[[str], object],
    ) -> None:
        target = self.processes.get(address)
        if target is None or not target.alive:
            failed("connection refused")
        elif (source.name, address) in self.undialled:
            failed("no route")
        elif target.frozen or self.is_cut(source, target) or self.is_cut(target, source):
            self.world.after(CONNECT_TIMEOUT_S, source, failed, "no answer in time")
        else:
            mine, theirs = End(self, source), End(self, target)
            mine.peer, theirs.peer = theirs, mine
            target.accept(theirs)
            opened(mine)

    def reset(self, end: End) -> None:
        """Break a stream; each side learns of it in its own time."""
        for side in (end, end.peer):
            self.world.after(self.world.rng.random() ** 3 * MAX_BREAK_S, side.owner, side.break_off, "reset")

    def cut(self, source: Process, target: Process) -> None:
        self._num_cuts += 1
        self.cuts[source.name, target.name] = self._num_cuts
        self.world.after(KEEPALIVE_S, None, self._keepalive, source, target, self._num_cuts)

    def slow(self, source: Process, target: Process, factor: float) -> None:
        self._slow[source.name, target.name] = factor

    def heal(self, source: Process, target: Process) -> None:
        """Let messages pass again, those held first."""
        self._slow.pop((source.name, target.name), None)
        if self.cuts.pop((source.name, target.name), None) is None:
            return
        for end in self._ends_from(source, target):
            held, end.held = end.held, []
            end.owner.catch_up(held)

    def watch_frozen(self, process: Process) -> None:
        """Let keepalive end the streams of a process that stays frozen."""
        self.world.after(KEEPALIVE_S, None, self._ping_frozen, process, process.num_freezes)

    def _ping_frozen(self, process: Process, num_freezes: int) -> None:
        if process.frozen and process.num_freezes == num_freezes:
            for end in list(process.ends):
                self._time_out(end)

    def _keepalive(self, source: Process, target: Process, number: int) -> None:
        if self.cuts.get((source.name, target.name)) == number:
            for end in self._ends_from(source, target):
                self._time_out(end)

    def _ends_from(self, source: Process, target: Process) -> list[End]:
        """Return the receiving ends of streams between processes of these names, whatever their incarnation."""
        names = source.name, target.name
        return [end for end in self.ends if (end.peer.owner.name, end.owner.name) == names]

    def _time_out(self, end: End) -> None:
        for side in (end, end.peer):
            self.world.after(self.world.rng.random() * 2.0, side.owner, side.break_off, "keepalive time-out")


def _nobody(what: object) -> None:
    """Take what arrives before anybody listens."""
