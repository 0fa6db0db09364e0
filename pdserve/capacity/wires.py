"""What workers send each other under virtual time: messages at once, pages as fast as links carry them."""

from pdserve.capacity.worker import SimWorker
from pdserve.kvtransfer import doors, sender
from pdserve.kvtransfer.session import Peer
from pdserve.perfmodel.profile import LinkFields
from pdserve.virtual_time import VirtualClock
from pdserve.worker.messages import Event


class Wires:
    """The links between all workers. Each worker sends one copy at a time, and receives one."""

    def __init__(self, clock: VirtualClock, link: LinkFields, page_bytes: int) -> None:
        self._clock = clock
        self._link = link
        self._page_bytes = page_bytes
        self._workers: dict[Peer, SimWorker] = {}
        self._connected: set[tuple[Peer, Peer]] = set()

    def add(self, worker: SimWorker) -> None:
        self._workers[worker.peer] = worker

    def remove(self, worker: SimWorker) -> None:
        del self._workers[worker.peer]

    def carry(self, worker: SimWorker, command: object) -> None:
        """Carry out what a worker's doors ask for."""
        match command:
            case doors.Connect(peer):
                if (worker.peer, peer) not in self._connected:
                    self._connected.add((worker.peer, peer))
                    self._offer(peer, doors.SenderAttached(worker.peer))
            case doors.Copy():
                self._copy(worker, command)
            case doors.ToReceiver(peer, key, message):
                self._offer(peer, doors.SenderSaid(worker.peer, key, message))
            case doors.ToSender(peer, key, message):
                self._offer(peer, doors.ReceiverSaid(worker.peer, key, message))
            case doors.Forget(peer):
                self._connected -= {(worker.peer, peer), (peer, worker.peer)}
            case _:
                pass

    def _offer(self, peer: Peer, event: Event) -> None:
        """Send a worker something, unless it has left: its end is reported by its routers."""
        if peer in self._workers:
            self._workers[peer].offer(event)

    def _copy(self, worker: SimWorker, copy: doors.Copy) -> None:
        target, link = self._workers.get(copy.peer), self._link
        if target is None:
            return
        start_s = max(self._clock.now_s(), worker.sends_until_s, target.receives_until_s)
        end_s = start_s + len(copy.src) * self._page_bytes / link.bytes_per_s
        worker.sends_until_s = target.receives_until_s = end_s
        stopped = doors.ReceiverSaid(copy.peer, copy.key, sender.CopyStopped((0,) * len(copy.src)))
        self._clock.at(end_s + link.latency_s, worker.offer, stopped)
